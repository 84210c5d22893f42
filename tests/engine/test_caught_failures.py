"""A step that failed, was caught by the user's loop, and what comes after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus

WIDTH = 64


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


def _train(rank: int, fails_on: tuple[int, ...]) -> None:
    """The gradients of the last layers are reduced before the backward fails."""
    settings: dict[str, Any] = dict(
        parallel=dict(data=2),
        optimizer=dict(type="SGD", lr=0.01),
        train=dict(global_batch_size=4, precision="fp64", seed=1),
        comm=dict(bucket_mb=0.01, shared_memory=False, timeout_seconds=3.0),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=Net, loss_fn=lambda y, batch: (y.square().sum(), y.shape[0]))
    for step in range(3):
        Failing.armed = step == 1 and rank in fails_on
        if Failing.armed:
            with pytest.raises(ArithmeticError):
                engine.train_step(torch.ones(2, WIDTH))
        elif step != 1 or len(fails_on) == 1:
            engine.train_step(torch.ones(2, WIDTH))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(Failing.apply(self.early(x)))


@pytest.mark.parametrize("fails_on", [(0, 1), (1,)])
def test_no_step_after_one_that_failed(fails_on: tuple[int, ...]) -> None:
    """Whether it failed on all ranks or on one: the engine says so, and nobody waits for long."""
    with pytest.raises(RankError, match="an earlier step or evaluation failed on this rank"):
        run_ranks(2, _train, fails_on, with_context=False, timeout=30)
