"""What a loss function may return, read and do: right as in one process, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.long import but
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.engine.loss_function import checked_sum
from colossus.state.model_state_dict import full_state_dict

# -- what it returns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.ones(()), r"returned one tensor of shape \(\); it must return \(sum, count\)"),
        ((1.5, 3), r"returned \(a float, a int\); it must return"),
        ((np.float64(1.5), np.int64(3)), r"returned \(a numpy.float64, a numpy.int64\); it must return"),
        ((torch.ones(()), None), r"returned \(one tensor of shape \(\), a NoneType\); it must return"),
        ({"loss": torch.ones(())}, "returned a dict; it must return"),
        ((torch.ones(3), 3), r"a sum of shape \(3,\) .* they must be scalars"),
        ((torch.ones(()), float("nan")), "a count of nan; it must be the number"),
    ],
)
def test_what_is_no_sum_and_count_is_told(result: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_sum(result)


@pytest.mark.parametrize("count", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3)])
def test_counts_are_numbers_of_any_kind(count: Any) -> None:
    total, number = checked_sum([torch.ones(()), count])
    assert (total, number) == (1, 3)


def test_a_loss_without_a_gradient_is_told() -> None:
    config = dict(optimizer=dict(type="SGD", lr=0.1), train=dict(global_batch_size=2), device="cpu")
    engine = colossus.initialize(
        config, model=lambda: nn.Linear(2, 2), loss_fn=lambda outputs, batch: (torch.zeros(()), 0)
    )
    with pytest.raises(ValueError, match=r"does not require a gradient.*outputs.sum\(\) \* 0.0, and a count of 0"):
        engine.train_step(torch.ones(2, 2))
    engine.close()


# -- what it reads ------------------------------------------------------------------------------------------------

WIDTH, SAMPLES, STEPS = 6, 8, 3
Penalty = Callable[[nn.Module, Tensor, Tensor], Tensor]


def weights_of(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.dim() == 2]


#: (model, sum of the losses, count) -> the sum that is returned
BY_COUNT: dict[str, Penalty] = {
    "l2": lambda net, total, count: total + 0.1 * count * sum(p.square().sum() for p in net.parameters()),
    "l1": lambda net, total, count: total + count * 0.01 * torch.stack([p.abs().sum() for p in net.parameters()]).sum(),
    "orthogonal": lambda net, total, count: total + count * 0.1 * sum((p @ p.t()).norm() for p in weights_of(net)),
    "scaled by a detached weight": lambda net, total, count: total * net[0].weight.detach().norm(),
    "a temperature": lambda net, total, count: total * net[3].temperature.exp().sum(),
}
#: what would be counted by each microbatch and rank
BY_CALL: dict[str, Penalty] = {
    "l2 once": lambda net, total, count: total + 0.1 * sum(p.square().sum() for p in net.parameters()),
    "l1 once": lambda net, total, count: total + net[0].weight.abs().sum(),
    "orthogonal once": lambda net, total, count: total + 0.1 * sum((p @ p.t()).norm() for p in weights_of(net)),
    "detached once": lambda net, total, count: total + net[0].weight.detach().norm(),
}
PENALTIES = BY_COUNT | BY_CALL


class Scaled(nn.Linear):
    """Its temperature is the loss function's."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor([0.5]))


class Penalized(nn.Sequential):
    """Its loss reads its parameters."""

    def __init__(self, penalty: str, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        last = Scaled() if penalty == "a temperature" else nn.Linear(WIDTH, WIDTH)
        super().__init__(linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), last)
        self.penalty = PENALTIES[penalty]

    def loss(self, outputs: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.tensor(outputs.numel() // WIDTH)
        return self.penalty(self, outputs.square().sum(), count), count


def _train(rank: int, plan: dict[str, Any], make: Callable[[], nn.Module]) -> Any:
    """Losses and weights, or the error."""
    config = dict(
        optimizer=dict(type="SGD", lr=0.05),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(timeout_seconds=20.0),
        device="cpu",
        **plan,
    )
    engine = colossus.initialize(config, model=make)
    count, losses = engine.context.size("data"), []
    try:
        for step in range(STEPS):
            x = torch.randn(SAMPLES, 4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            losses.append(engine.train_step(x.chunk(count)[engine.context.index("data")]).loss)
        return losses, full_state_dict(engine.model, engine.context)
    except (ValueError, RuntimeError, AttributeError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        engine.close()


def _train_all(rank: int, plan: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: _train(rank, plan, lambda name=name: Penalized(name)) for name in names}


def require_equal(results: Any, wanted: Any, name: str) -> None:
    message = lambda words: f"{name}: {words}"  # noqa: E731
    assert not isinstance(results, str), f"{name}: {results}"
    torch.testing.assert_close(results, wanted, rtol=1e-10, atol=1e-12, msg=message)


WHOLE: dict[str, tuple[int, dict[str, Any]]] = {
    "microbatches": (1, dict(schedule=dict(microbatches=2))),
    "data": (2, dict(parallel=dict(data=2))),
    "zero 2": (2, dict(parallel=dict(data=2, zero=2), schedule=dict(microbatches=2))),
    "sequence": (2, dict(parallel=dict(sequence=2))),
}


@pytest.mark.parametrize("name", but(("microbatches", "zero 2", "sequence"), WHOLE))
def test_a_penalty_is_weighted_by_the_count_or_refused(name: str) -> None:
    world, plan = WHOLE[name]
    alone = run_ranks(1, _train_all, {}, list(BY_COUNT), with_context=False)[0]
    for results in run_ranks(world, _train_all, plan, list(PENALTIES), with_context=False):
        for penalty in BY_COUNT:
            require_equal(results[penalty], alone[penalty], penalty)
        for penalty in BY_CALL:
            message = results[penalty]
            assert "the loss function reads 0.weight" in message, (penalty, message)
            assert "does not grow with the samples" in message
            assert "total + 0.01 * count * penalty" in message
            assert "test_loss_functions.py:" in message


def test_one_process_counts_a_penalty_once() -> None:
    for result in run_ranks(1, _train_all, {}, list(BY_CALL), with_context=False)[0].values():
        assert not isinstance(result, str)


PARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, dict(parallel=dict(data=2, zero=3))),
    "1d": (2, dict(parallel=dict(tensor=2))),
    "sequence sharded": (2, dict(parallel=dict(tensor=dict(size=2, sequence_sharded=True)))),
    "2d": (4, dict(parallel=dict(tensor=dict(mode="2d", size=4)))),
    "3d": (4, dict(parallel=dict(tensor=dict(mode="3d", size=4, shape=(2, 1, 2))))),
}


def _train_parts(rank: int, plan: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: _train(rank, plan, lambda name=name: Penalized(name, layers.Linear)) for name in names}


@pytest.mark.parametrize("name", but(("sequence sharded", "1d", "2d", "3d"), PARTS))
def test_a_weight_of_which_ranks_have_parts_is_refused(name: str) -> None:
    world, plan = PARTS[name]
    alone = run_ranks(1, _train_parts, {}, ["a temperature"], with_context=False)[0]["a temperature"]
    for results in run_ranks(world, _train_parts, plan, list(PENALTIES), with_context=False):
        for penalty, result in results.items():
            if penalty == "a temperature" and name != "zero 3":
                require_equal(result, alone, penalty)
            else:
                assert isinstance(result, str), (penalty, result)
                assert "0.weight" in result or "3.temperature" in result, (penalty, result)
                assert "of which this rank holds" in result or "has a part" in result, (penalty, result)


@pytest.mark.parametrize("penalty", but(PENALTIES.keys() - {"l2", "a temperature"}, PENALTIES))
def test_a_penalty_under_a_pipeline_is_refused(penalty: str) -> None:
    plan = dict(parallel=dict(pipeline=2), schedule=dict(microbatches=2))
    first, last = run_ranks(2, _train, plan, lambda: Penalized(penalty), with_context=False)
    if penalty == "a temperature":
        require_equal(last, run_ranks(1, _train_all, {}, [penalty], with_context=False)[0][penalty], penalty)
        return
    assert "is gone" in first
    assert "test_loss_functions.py:" in last
    if "net[0]" in last:  # which that rank has not
        assert "An attribute of a module may be on another stage" in last
    else:
        assert "the loss function reads 3.weight" in last
        assert "under a pipeline the last stage, which computes the loss, has only its own parameters" in last
