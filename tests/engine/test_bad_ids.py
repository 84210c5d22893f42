"""Ids that are not in a table: named with rank, row of the batch and id, and no other rank waits for the one that has
them."""

from __future__ import annotations

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


def _step(rank: int, kind: str, bad: int, among: tuple[int, ...] = (1,)) -> tuple[str, str]:
    """The error of a step in which ranks have a bad id in the second of two microbatches."""
    config = dict(
        parallel=dict(data=2, strategy=dict(type="hybrid", ways={"*": "owners"})),
        optimizer=dict(type="SGD", lr=0.1),
        schedule=dict(microbatches=2),
        train=dict(steps=3, global_batch_size=2 * SAMPLES, precision="fp64"),
    )
    engine = colossus.initialize(config, model=lambda: Net(kind))
    good = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % (ROWS - 1) + 1
    ids = good.clone()
    if kind == "head":
        ids[BAD_ROW, 0] = -100
    if rank in among:
        ids[BAD_ROW, 2] = bad
    kind_of, text = "", ""
    try:
        engine.train_step(ids)
    except (ValueError, RuntimeError) as error:
        kind_of, text = type(error).__name__, f"{error} culprit {getattr(error, 'culprit', None)}"
    return kind_of, text


@pytest.mark.rest("torch's--1", "bag--1", "torch's bag--1", "head-23")
@pytest.mark.parametrize("bad", [ROWS, -1])
@pytest.mark.parametrize("kind", ["ours", "torch's", "bag", "torch's bag", "head"])
def test_a_bad_id_is_told_on_all_ranks(kind: str, bad: int) -> None:
    other, own = run_ranks(2, _step, kind, bad, with_context=False, timeout=20)
    assert own[0] == "ValueError"
    assert own[1].startswith(
        f"table 'table.weight' has ids 0..{ROWS - 1}, but rank 1 was given id {bad} in row {BAD_ROW} of its batch, "
        f"place 2 of it (microbatch 1): make the table larger"
    )
    assert other[0] == "RuntimeError"
    assert other[1].startswith("rank 1 cannot go on with its lookups in 'table.weight'")
    assert other[1].endswith("culprit 1")  # in the report of a run
    assert own[1].endswith("culprit None")


def test_two_ranks_with_bad_ids_say_each_its_own() -> None:
    found = run_ranks(2, _step, "ours", ROWS, (0, 1), with_context=False, timeout=20)
    for rank, (kind, text) in enumerate(found):
        assert kind == "ValueError"
        assert f"rank {rank} was given id {ROWS} in row {BAD_ROW}" in text
