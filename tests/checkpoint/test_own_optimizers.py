"""Optimizers of a user's own: what they keep beside the state of each parameter, and where they keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.small_run import Net, Numbers
from torch import Tensor

import colossus
from colossus.checkpoint.errors import CheckpointError


def engine_of(root: Path, optimizer: Any, *, data: int = 1, every: int = 0) -> Any:
    return colossus.initialize(
        dict(
            parallel=dict(data=data),
            model=dict(type=Net),
            data=dict(type=Numbers),
            train=dict(steps=6, global_batch_size=8, seed=1, precision="fp64"),
            checkpoint=dict(dir=str(root), every=every),
            comm=dict(timeout_seconds=30.0),
            device="cpu",
        ),
        optimizer=lambda named: optimizer([param for _, param in named], lr=0.01),
    )


class Wraps(torch.optim.Optimizer):
    """As implementations of SAM do it: the groups are shared, the state is the inner one's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, dict(lr=lr))
        self.base = torch.optim.AdamW(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Shares(Wraps):
    """One state for both, also after a load."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.state = self.base.state


class KeepsAMean(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        own: Any = self.state
        own["mean"] = torch.zeros(3)


REFUSED = {
    Wraps: "Wraps has another optimizer in .base: let both keep one state",
    KeepsAMean: "KeepsAMean keeps 'mean' in its state, which is the state of no parameter",
}


def wraps(rank: int, root: Path) -> tuple[str, list[str], list[Tensor], list[Tensor]]:
    with pytest.raises(ValueError, match=r"set checkpoint\.every = 0") as caught:
        engine_of(root, Wraps, every=1)
    at_the_start, when_saved = str(caught.value), []
    for optimizer in REFUSED:
        engine = engine_of(root, optimizer)
        engine.train_step(next(engine.loader))
        with pytest.raises(CheckpointError) as refused:
            engine.checkpoints.save().wait()
        when_saved.append(str(refused.value))
        engine.close()
    engine = engine_of(root, Shares, every=1)
    engine.train_step(next(engine.loader))
    engine.checkpoints.save().wait()
    engine.train_step(next(engine.loader))
    whole = [param.detach().clone() for param in engine.model.parameters()]
    engine.close()
    engine = engine_of(root, Shares)
    engine.checkpoints.load(root)
    engine.train_step(next(engine.loader))
    halves = [param.detach().clone() for param in engine.model.parameters()]
    engine.close()
    return at_the_start, when_saved, whole, halves


def test_state_that_an_optimizer_hides_is_refused(tmp_path: Path) -> None:
    """When a run begins that is to be saved, else when it is saved."""
    ((at_the_start, when_saved, whole, halves),) = run_ranks(1, wraps, tmp_path, with_context=False)
    assert REFUSED[Wraps] in at_the_start
    for message, said in zip(when_saved, REFUSED.values(), strict=True):
        assert said in message
    assert all(map(torch.equal, whole, halves))
