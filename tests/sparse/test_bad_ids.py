"""Ids that are not in a table are named with rank, row of the batch and id."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers

ROWS, SAMPLES, LENGTH, BAD_ROW = 23, 6, 3, 4


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "head":
            self.table: nn.Module = layers.SampledSoftmax(2, ROWS, 5)
        elif kind == "bag":
            self.table = layers.EmbeddingBag(ROWS, 2, sparse=True, padding_idx=0)
        elif kind == "torch's bag":
            self.table = nn.EmbeddingBag(ROWS, 2, sparse=True, padding_idx=0)
        else:
            self.table = (layers if kind == "ours" else nn).Embedding(ROWS, 2, sparse=True)  # type: ignore[attr-defined]
        self.out = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "head":
            return self.out(torch.ones(*ids.shape, 2, dtype=self.out.weight.dtype))
        return self.out(self.table(ids))

    def loss(self, y: Tensor, ids: Tensor) -> tuple[Tensor, Any]:
        return self.table(y, ids) if self.kind == "head" else (y.sum(), len(y))


def _step(rank: int, kind: str, bad: int) -> str:
    """The error of a step with a bad id in the second of two microbatches."""
    config = dict(
        parallel=dict(strategy=dict(type="hybrid", ways={"*": "owners"})),
        optimizer=dict(type="SGD", lr=0.1),
        schedule=dict(microbatches=2),
        train=dict(steps=3, global_batch_size=int(os.environ["WORLD_SIZE"]) * SAMPLES, precision="fp64"),
    )
    engine = colossus.initialize(config, model=lambda: Net(kind))
    ids = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % (ROWS - 1) + 1
    if kind == "head":
        ids[BAD_ROW, 0] = -100
    ids[BAD_ROW, 2] = bad
    with pytest.raises(ValueError, match="make the table larger") as caught:
        engine.train_step(ids)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["ours", "torch's", "bag", "torch's bag", "head"])
def test_a_bad_id_is_named_with_rank_and_place(kind: str) -> None:
    for world, bad in ((1, ROWS), (2, -1)):
        for rank, text in enumerate(run_ranks(world, _step, kind, bad, with_context=False, timeout=20)):
            assert text.startswith(
                f"table 'table.weight' has ids 0..{ROWS - 1}, but rank {rank} was given id {bad} in row {BAD_ROW} of "
                f"its batch, place 2 of it (microbatch 1): make the table larger"
            )
