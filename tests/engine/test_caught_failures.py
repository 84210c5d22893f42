"""A step that failed, was caught by the user's loop, and what comes after it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus

WIDTH, SAMPLES = 256, 4


class Failing(torch.autograd.Function):
    """The identity, whose backward fails when asked to."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Failing.armed:
            raise ArithmeticError("a backward of mine failed")
        return grad


class Net(nn.Module):
    """Backward reduces the gradients of ``late`` before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.late(Failing.apply(self.early(x)))


def _train(rank: int, fails_on: tuple[int, ...], shared_memory: bool, seconds: float = 60.0, model: Any = Net) -> Any:
    count = int(os.environ["WORLD_SIZE"])
    settings: dict[str, Any] = dict(
        parallel=dict(data=count),
        optimizer=dict(type="SGD", lr=0.01),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(bucket_mb=0.1, shared_memory=shared_memory, timeout_seconds=seconds),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=model, loss_fn=lambda y, batch: (y.square().sum(), y.shape[0]))
    norms = []
    for step in range(6):
        batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        batch = batch.chunk(count)[engine.context.index("data")]
        Failing.armed = step in (1, 3) and rank in fails_on
        if Failing.armed:
            with pytest.raises(ArithmeticError):
                engine.train_step(batch)
        elif step not in (1, 3) or len(fails_on) < count:
            norms.append(engine.train_step(batch).grad_norm)
    engine.close()
    return norms


class Early(nn.Module):
    """Fails in forward on rank 1, in backward on rank 0: not after the same collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        if Failing.armed and int(os.environ["RANK"]) == 1:
            raise ArithmeticError("a forward of mine failed")
        y: Tensor = self.net(x)
        return y


@pytest.mark.rest("True")
@pytest.mark.parametrize("shared_memory", [False, True])
def test_gradients_after_a_step_that_failed_everywhere(shared_memory: bool) -> None:
    """The reductions that it had started must be over before the next step fills their buffers."""
    (alone,) = run_ranks(1, _train, (0,), shared_memory, with_context=False)
    for _ in range(3):
        for norms in run_ranks(2, _train, (0, 1), shared_memory, with_context=False):
            assert norms == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("shared_memory", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_step_that_failed_on_one_rank_only_is_told_there(shared_memory: bool) -> None:
    words = "the step before failed on this rank .* and not on"
    with pytest.raises(RankError, match=words):
        run_ranks(2, _train, (1,), shared_memory, 3.0, with_context=False, timeout=30)


def test_a_step_that_failed_in_different_places_is_told() -> None:
    words = r"failed on all ranks, but not in the same place: rank \d had run \d+ collectives over data, rank \d \d+"
    with pytest.raises(RankError, match=words):
        run_ranks(2, _train, (0, 1), False, 3.0, Early, with_context=False, timeout=30)
