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


@pytest.mark.parametrize("fails_on", [(0, 1), (1,)])
def test_no_step_after_one_that_failed(fails_on: tuple[int, ...]) -> None:
    """Whether it failed on all ranks or on one: the engine says so, and nobody waits for long."""
    with pytest.raises(RankError, match="an earlier step or evaluation failed on this rank"):
        run_ranks(2, _train, fails_on, False, 3.0, with_context=False, timeout=30)
