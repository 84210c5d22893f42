"""Loss functions beside a model whose parameters they read: right as in one process, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from helpers.long import but
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.state.model_state_dict import full_state_dict

WIDTH, SAMPLES = 6, 8
Read = Callable[[nn.Module], Any]


class Chain(nn.Sequential):
    """A chain whose last block has no parameters."""

    made: ClassVar[list[nn.Module]] = []

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        Chain.made.append(self)


class Mixture(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), layers.MoE(WIDTH, 2 * WIDTH, 4, 2))
        Chain.made.append(self)


def squares(net: nn.Module) -> Any:
    return sum(p.square().sum() for p in net.parameters())


def vector(net: nn.Module) -> Any:
    params = [*net.parameters()]
    return nn.utils.parameters_to_vector(params).norm() if params else 0.0


@torch.no_grad()
def number(net: nn.Module) -> Any:
    return sum(float(p.norm()) for p in net.parameters())


class Bound:
    """An object that holds the model."""

    def __init__(self, read: Read) -> None:
        self.read = read

    def loss(self, outputs: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.tensor(len(outputs))
        return outputs.square().sum() + 0.1 * count * self.read(Chain.made[-1]), count


def step(rank: int, plan: dict[str, Any], make: Callable[[], nn.Module], read: Read, evaluates: bool = False) -> Any:
    """Body of a rank: the loss, and the weights behind it; or the error."""
    config = dict(
        optimizer=dict(type="SGD", lr=0.05), train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(timeout_seconds=20.0), device="cpu", **plan,
    )  # fmt: skip
    engine = colossus.initialize(config, model=make, loss_fn=Bound(read).loss)
    x = torch.linspace(-1, 1, SAMPLES * 3 * WIDTH, dtype=torch.float64).view(SAMPLES, 3, WIDTH)
    own = x.chunk(engine.context.size("data"))[engine.context.index("data")]
    try:
        loss = (engine.eval_step if evaluates else engine.train_step)(own).loss
        return loss, full_state_dict(engine.model, engine.context)
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        engine.close()


def require_right(ranks: list[Any], make: Callable[[], nn.Module], read: Read, evaluates: bool = False) -> None:
    ((loss, wanted),) = run_ranks(1, step, {}, make, read, evaluates, with_context=False)
    for result in ranks:
        assert not isinstance(result, str), result
        assert result[0] == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(result[1], wanted, rtol=1e-10, atol=1e-12)


def require_refused(ranks: list[Any], *words: str) -> None:
    assert all(isinstance(message, str) for message in ranks), ranks
    assert any(some in message for message in ranks for some in words), ranks


#: whether it is refused; world size, plan
PLANS: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "pipeline": (True, 2, dict(parallel=dict(pipeline=2))),
    "a last stage without parameters": (True, 2, dict(parallel=dict(pipeline=dict(size=2, split=[3, 1])))),
    "interleaved": (True, 2, dict(parallel=dict(pipeline=2), schedule=dict(type="interleaved", microbatches=2))),
    "zb-v": (True, 2, dict(parallel=dict(pipeline=2), schedule=dict(type="zb-v", microbatches=2))),
    "pipeline and data": (True, 4, dict(parallel=dict(pipeline=2, data=2))),
    "zero 3": (True, 2, dict(parallel=dict(data=2, zero=3))),
    "data": (False, 2, dict(parallel=dict(data=2), schedule=dict(microbatches=2))),
    "zero 2": (False, 2, dict(parallel=dict(data=2, zero=2))),
    "1d, torch's own layers": (False, 2, dict(parallel=dict(tensor=2))),
}


@pytest.mark.parametrize("evaluates", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("read", but((vector, number), (squares, vector, number)))
@pytest.mark.parametrize("name", but(PLANS.keys() - {"a last stage without parameters"}, PLANS))
def test_a_loss_function_that_holds_the_model(name: str, read: Read, evaluates: bool) -> None:
    is_refused, world, plan = PLANS[name]
    ranks = run_ranks(world, step, plan, Chain, read, evaluates, with_context=False)
    if is_refused:
        require_refused(ranks, "the loss function reads", "of which this rank holds")
    else:
        require_right(ranks, Chain, read, evaluates)


@pytest.mark.long
@pytest.mark.parametrize("plan", [dict(data=2, expert=2), dict(data=2, expert=2, zero=1), dict(tensor=2)], ids=str)
@pytest.mark.parametrize("part", ["0", "1.router", "1"])
def test_a_loss_function_that_reads_experts(part: str, plan: dict[str, Any]) -> None:
    def read(net: nn.Module) -> Any:
        return squares(net.get_submodule(part))

    ranks = run_ranks(2, step, dict(parallel=plan), Mixture, read, with_context=False)
    if part == "1":
        require_refused(ranks, "(Experts parameter of shape")
    else:
        require_right(ranks, Mixture, read)
