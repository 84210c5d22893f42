"""Hooks and attributes of parameters go along when modules are swapped, stored in parts, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.user_models.cases import TOKENS, WIDTH, PlainKit, UserModel, classify, tokens
from helpers.user_models.table import PLANS, Plan, fill, twins
from torch import Tensor, nn

import colossus
from colossus.layout.parameter import logical_parameters


class Hooked(nn.Module):
    """Hooks of both kinds on tied words, pairs, a linear alone, a norm and a parameter that the model holds itself."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
            self.up.weight.register_hook(lambda grad: torch.where(grad.isnan(), 0.0, grad * 0.5))
            self.down.weight.register_hook(lambda grad: grad.mul_(0.25))
            self.down.bias.register_hook(torch.neg)
            removed = self.up.bias.register_hook(lambda grad: grad * 100)
            removed.remove()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.alone = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.words.weight.register_hook(lambda grad: grad * 3.0)
        self.alone.weight.register_post_accumulate_grad_hook(_freeze)
        self.norm.weight.register_post_accumulate_grad_hook(_freeze)
        self.gain.register_hook(torch.zeros_like)
        for number, parameter in enumerate(self.parameters()):
            parameter.lr_scale = 1.0 + number  # type: ignore[attr-defined]
        self.norm.weight._no_weight_decay = True  # type: ignore[attr-defined]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.alone(self.words(ids) * self.gain)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _freeze(parameter: Tensor) -> None:
    """Zero a gradient: the same after each microbatch of a step."""
    assert parameter.grad is not None
    parameter.grad *= 0.0


EXAMPLE = torch.ones(2, TOKENS, dtype=torch.long)


def swapped(make: Callable[[], nn.Module]) -> nn.Module:
    return colossus.parallelize(make, example=EXAMPLE)()


HOOKED = UserModel("hooked", lambda kit: Hooked() if kit is PlainKit else swapped(Hooked), tokens, classify)


STEP = Plan(2, dict(tensor=dict(mode="1d", size=2, weights="step")), dict(type="1f1b", microbatches=2))
OFTEN = ["microbatches 2", "data 2 zero 3", "1d 2", "1d 2 step"]
SELDOM = [
    "one process",
    "2d 4",
    "data 2",
    "data 2 zero 1",
    "pipeline 2 zb-h1",
    "3d 4 (2,1,2)",
    "2.5d 8",
    "data 2 x 1d 2",
]


@pytest.mark.parametrize("plans", [OFTEN, pytest.param(SELDOM, marks=pytest.mark.long)], ids=["often", "seldom"])
def test_hooks_are_called_under_every_plan(plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANS, "1d 2 step", STEP)
    for cell in fill([HOOKED], plans, twins([HOOKED])):
        assert cell.outcome == "equal", f"{cell.plan}: {cell.words}"


def _marks(rank: int, plan: str) -> dict[str, Any]:
    config = dict(
        parallel=PLANS[plan].parallel, schedule=PLANS[plan].schedule, train=dict(global_batch_size=8), device="cpu"
    )
    engine = colossus.initialize(config, model=lambda: swapped(Hooked), loss_fn=classify)
    model = colossus.plain(engine)
    found = {
        each.name: (each.parameter.lr_scale, hasattr(each.parameter, "_no_weight_decay"))  # type: ignore[attr-defined]
        for each in logical_parameters(engine.model)
    }
    assert model is not None
    assert found == {
        name: (param.lr_scale, hasattr(param, "_no_weight_decay")) for name, param in model.named_parameters()
    }  # type: ignore[attr-defined]
    model(EXAMPLE).sum().backward()
    twin = Hooked()
    twin.load_state_dict(model.state_dict())
    twin(EXAMPLE).sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)
    engine.close()
    return found


@pytest.mark.parametrize("plan", ["data 2 zero 3", "1d 2"])
def test_attributes_are_those_of_the_constructor(plan: str) -> None:
    wanted = {
        name: (parameter.lr_scale, hasattr(parameter, "_no_weight_decay"))  # type: ignore[attr-defined]
        for name, parameter in Hooked().named_parameters()
    }
    assert run_ranks(PLANS[plan].world, _marks, plan, with_context=False)[0] == wanted


# -- what is refused --------------------------------------------------------------------------------------------


class Asking(nn.Module):
    """A hook on the weight of the first of two linears, in a list of blocks."""

    def __init__(self, hook: Callable[[Tensor], Any], *, later: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)
        weight = self.words.weight if sparse else self.blocks[0].weight
        (weight.register_post_accumulate_grad_hook if later else weight.register_hook)(hook)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _refused(name: str, plan: str, words: str, hook: Callable[[Tensor], Any], **options: Any) -> tuple[UserModel, str]:
    def make(kit: Any) -> nn.Module:
        return Asking(hook, **options) if kit is PlainKit else swapped(lambda: Asking(hook, **options))

    return UserModel(name, make, tokens, classify, {plan: words}), plan


PART = "but this rank has a part of the gradient"
REFUSED = [
    _refused("norm", "1d 2", f"blocks.0.weight (Linear parameter of shape (8, 8)) calls linalg_vector_norm, {PART}",
             lambda grad: grad / grad.norm()),
    _refused("size", "1d 2", f"asks for its size, {PART}", lambda grad: grad / grad.numel()),
    _refused("rows", "1d 2", "calls mul on shapes", lambda grad: grad * torch.arange(8.0)[:, None]),
    _refused("noise", "1d 2", "calls randn_like", lambda grad: grad + torch.randn_like(grad)),
    _refused("sum later", "1d 2", f"calls sum, {PART}", lambda param: param.grad.sub_(param.grad.sum()), later=True),
    _refused("later", "data 2 zero 3", "has a hook of register_post_accumulate_grad_hook", _freeze, later=True),
    _refused("sparse", "data 2", "words.weight has sparse=True and a hook", torch.neg, sparse=True),
]  # fmt: skip


def test_what_a_part_of_a_gradient_cannot_tell() -> None:
    for plan in ("1d 2", "data 2 zero 3", "data 2"):
        for cell in fill([model for model, of in REFUSED if of == plan], [plan], {}):
            assert cell.outcome == "refused", f"{cell.model}: {cell.words}"
