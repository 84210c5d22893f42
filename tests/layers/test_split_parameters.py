"""A parameter of which a rank holds a part, in functions of torch: right, or refused by its name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.modes import MODES
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.layout.split_parameter import ParameterPart, as_shards, local_shape

WORDS, HIDDEN, TOKENS = 24, 12, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids, self.up, self.norm = (
            layers.Embedding(WORDS, HIDDEN),
            layers.Linear(HIDDEN, 24),
            layers.LayerNorm(HIDDEN),
        )
        self.frozen = layers.Linear(HIDDEN, 24)
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.up(self.norm(self.ids(ids)))


REFUSED: dict[str, tuple[str, str, Callable[[Net, Tensor], Any]]] = {
    "a head tied by hand": ("ids.weight", "LMHead", lambda net, x: F.linear(x, net.ids.weight)),
    "of a transposed weight": ("ids.weight", "LMHead", lambda net, x: x @ net.ids.weight.t()),
    "of a property": ("ids.weight", "LMHead", lambda net, x: torch.matmul(x, net.ids.weight.T)),
    "einsum": ("up.weight", "Call the layer", lambda net, x: torch.einsum("btk,nk->btn", x, net.up.weight)),
    "frozen": ("frozen.weight", "Call the layer", lambda net, x: F.linear(x, net.frozen.weight)),
    "with a bias": ("up.bias", "Call the layer", lambda net, x: F.linear(x, torch.ones(24, HIDDEN), net.up.bias)),
    "a lookup": ("ids.weight", "Call the layer", lambda net, x: F.embedding(torch.tensor([1]), net.ids.weight)),
    "positions": ("ids.weight", "Call the layer", lambda net, x: x + net.ids.weight[:TOKENS]),
    "a penalty": ("ids.weight", "weight_decay", lambda net, x: sum(p.square().sum() for p in net.parameters())),
    "an average": ("up.weight", "full_state_dict", lambda net, x: net.up.weight.mean()),
    "in a list": ("up.weight", "full_state_dict", lambda net, x: torch.cat([net.up.weight, torch.ones(1, HIDDEN)])),
}


@pytest.mark.rest("2d")
@pytest.mark.parametrize("mode", ["1d", "2d", "3d"])
def test_a_split_parameter_is_not_the_parameter(mode: str) -> None:
    def body(context: ParallelContext) -> dict[str, str]:
        net: Any = colossus.build(Net, context)
        found = {}
        for name, (_, _, act) in REFUSED.items():
            try:
                act(net, torch.ones(2, TOKENS, HIDDEN))
                found[name] = "nothing"
            except ValueError as error:
                found[name] = str(error)
        try:
            with torch.no_grad():
                F.linear(torch.ones(2, HIDDEN), net.ids.weight)
            found["without gradients"] = "nothing"
        except ValueError as error:
            found["without gradients"] = str(error)
        return found

    for found in MODES[mode].run(body):
        assert found.pop("without gradients").startswith("ids.weight (Embedding parameter of shape (24, 12)): linear")
        for name, (parameter, remedy, _) in REFUSED.items():
            assert found[name].startswith(parameter), (name, found[name])
            assert remedy in found[name], (name, found[name])
            assert "this rank holds" in found[name]


def test_what_only_looks_at_it_or_changes_it_works() -> None:
    """Optimizers, averages of weights, hooks, gradients, copies, numbers without gradients."""

    def body(context: ParallelContext) -> None:
        net: Any = colossus.build(Net, context)
        weight = net.ids.weight
        plain = weight.detach().clone()
        assert type(plain) is ParameterPart
        heard: list[Tensor] = []
        weight.register_hook(heard.append)
        weight.register_post_accumulate_grad_hook(lambda parameter: heard.append(parameter.grad))
        for optimizer in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
                net.zero_grad()
                net(torch.arange(TOKENS).expand(2, TOKENS)).square().sum().backward()
                nn.utils.clip_grad_value_([p for p in net.parameters() if p.grad is not None], 1.0)
                optimizer([p for p in net.parameters() if p.requires_grad], lr=0.1, **options).step()
        assert len(heard) == 18
        with torch.no_grad():
            plain.lerp_(weight, 0.5)
            weight.copy_(plain).mul_(2.0)
        with as_shards():
            assert torch.equal(weight, plain * 2.0)
        weight.data.fill_(1.0)
        assert weight.shape == weight.size() == (WORDS, HIDDEN)
        assert local_shape(weight) == (12, HIDDEN)
        assert weight.requires_grad
        assert weight.is_leaf
        copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(weight))
        saved = copy.deepcopy(net.state_dict()["ids.weight"])
        with as_shards():
            for other in (weight.clone(), copied.ids.weight, pickled, saved):
                assert torch.equal(other, torch.ones(12, HIDDEN))
        with pytest.raises(ValueError, match=r"ids\.weight .* linear was called with the parameter itself"):
            F.linear(torch.ones(2, HIDDEN), copied.ids.weight)
        net.load_state_dict(pickle.loads(pickle.dumps(net.state_dict())))

    run_ranks(2, body)


@pytest.mark.rest("2d")
@pytest.mark.parametrize("mode", ["1d", "2d", "3d"])
def test_sizes_are_those_of_the_whole(mode: str) -> None:
    """What a model reads of its weights, and a count of parameters for a log."""

    class Fused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.pair = layers.Linear(HIDDEN, {"gate": 24, "value": 12}, split="column")

    def body(context: ParallelContext) -> dict[str, tuple[int, ...]]:
        net = colossus.build(Fused, context)
        for param in net.parameters():
            assert param.numel() == torch.numel(param) == param.nelement() == param.shape.numel()
            assert (param.size(0), len(param)) == (param.shape[0],) * 2
        return {name: tuple(param.shape) for name, param in net.named_parameters()}

    assert all(shapes == {
        "ids.weight": (WORDS, HIDDEN),
        **{f"{name}.weight": (24, HIDDEN) for name in ("up", "frozen")},
        **{f"{name}.bias": (24,) for name in ("up", "frozen")},
        "norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,), "pair.weight": (36, HIDDEN), "pair.bias": (36,),
    } for shapes in MODES[mode].run(body))  # fmt: skip


def test_a_whole_parameter_is_a_plain_one() -> None:
    def body(context: ParallelContext) -> None:
        net: Any = colossus.build(Net, context)
        assert type(net.norm.weight) is nn.Parameter
        assert (type(net.up.weight) is nn.Parameter) is (context.world_size == 1)

    run_ranks(1, body)
    run_ranks(2, body)


class Again(nn.Module):
    """Computed again in backward, with activations that stay split in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(HIDDEN, 24, split="column"), layers.Linear(24, HIDDEN, split="row")

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.down(torch.relu(self.up(x))), x, use_reentrant=False)


def test_gradients_that_are_asked_for() -> None:
    """``backward(inputs=...)`` and ``torch.autograd.grad`` of split parameters, through a checkpoint."""

    def body(context: ParallelContext) -> None:
        net: Any = colossus.build(Again, context, dtype=torch.float64)
        x = torch.linspace(-1, 1, 2 * HIDDEN, dtype=torch.float64).view(2, HIDDEN)
        net(x).square().sum().backward()
        want = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        net(x).square().sum().backward(inputs=list(net.parameters()))
        found = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        for parameter, mine, expected in zip(net.parameters(), found, want, strict=True):
            with as_shards():
                assert torch.equal(parameter.grad, expected)
                assert torch.equal(mine, expected)
            assert type(mine) is type(parameter.grad) is (Tensor if type(parameter) is nn.Parameter else ParameterPart)

    run_ranks(2, body)
