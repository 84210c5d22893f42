"""The parameter of a table whose rows have owners, read by a model itself: refused, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossus
from colossus import layers

ROWS, DIM, SAMPLES = 23, 3, 4

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean of detached": lambda w, h: h - w.detach().mean(0),
    "product": lambda w, h: h @ w.t(),
    "index": lambda w, h: w[torch.tensor([1, 2])].sum() + h,
    "norm": lambda w, h: h + w.norm(),
    "sum": lambda w, h: h + w.sum(),
    "numpy": lambda w, h: h + float(w.numpy().mean()),
    "in place": lambda w, h: h + w.mul_(0.5).sum(),
}


class Net(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table = kind(ROWS, DIM, sparse=True)
        self.read: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return rows if self.read is None else self.read(self.table.weight, rows)

    def loss(self, y: Tensor, ids: Tensor) -> tuple[Tensor, int]:
        return y.sum(), len(y)


def _errors(rank: int, way: str, kind: Any) -> dict[str, str]:
    """What each read says in an evaluation, and the first in a step; "" where it is computed."""
    config = dict(
        parallel=dict(data=2, strategy=dict(type="hybrid", ways={"*": way})),
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(steps=3, global_batch_size=2 * SAMPLES, precision="fp64"),
    )
    found = {}
    for name, read in [("in a step", READS["mean of detached"]), *READS.items()]:
        engine = colossus.initialize(config, model=lambda: Net(kind))
        model, ids = next(m for m in engine.model.modules() if isinstance(m, Net)), torch.arange(SAMPLES) + rank
        engine.train_step(ids)
        assert model.table.weight.shape[0] == ROWS  # may be asked for
        repr(model.table.weight)
        model.read = read
        try:
            engine.train_step(ids) if name == "in a step" else engine.eval_step(ids)
            found[name] = ""
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
        engine.close()
    return found


@pytest.mark.parametrize("kind", [nn.Embedding, layers.Embedding], ids=["torch", "ours"])
def test_an_owned_table_is_looked_up_and_nothing_else(kind: Any) -> None:
    for found in run_ranks(2, _errors, "owners", kind, with_context=False, timeout=30):
        for name, said in found.items():
            assert "was called with the parameter itself, of which this rank holds the 1" in said, name
            assert f"of {ROWS} rows" in said, name
            assert "parallel.strategy.ways = {'table.weight': 'gather'}" in said, name


def test_a_table_that_is_whole_on_each_rank_may_be_read() -> None:
    for found in run_ranks(2, _errors, "gather", nn.Embedding, with_context=False, timeout=30):
        assert not any(found[name] for name in ("in a step", "mean of detached", "product", "norm", "index", "sum"))


class Checkpointed(Net):
    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda ids: self.table(ids).tanh(), ids, use_reentrant=False)
        return y


def _own_backward(rank: int) -> str:
    """What a user's own backward of a checkpointed lookup says."""
    config = dict(
        parallel=dict(data=2, strategy=dict(type="hybrid", ways={"*": "owners"})),
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(steps=3, global_batch_size=2 * SAMPLES, precision="fp64"),
    )
    engine = colossus.initialize(config, model=lambda: Checkpointed(nn.Embedding))
    ids = torch.arange(SAMPLES) + rank
    engine.train_step(ids)
    with pytest.raises(ValueError, match="are not on this rank any more") as error:
        engine.model(ids).sum().backward()
    return str(error.value)


def test_a_backward_of_ones_own_finds_no_rows_again() -> None:
    for said in run_ranks(2, _own_backward, with_context=False, timeout=20):
        assert "Only engine.train_step keeps the rows of a forward for its recomputation" in said
