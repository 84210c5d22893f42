"""Ids that are not in a table are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossus
from colossus import layers

ROWS, SAMPLES = 23, 6


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        bag = layers.EmbeddingBag if kind == "bag" else nn.EmbeddingBag
        embedding = layers.Embedding if kind == "ours" else nn.Embedding
        self.table: Any = (bag if "bag" in kind else embedding)(ROWS, 2, sparse=True, padding_idx=0)
        self.out = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


@pytest.mark.parametrize("kind", ["ours", "torch's", "bag", "torch's bag"])
def test_a_bad_id_is_named(kind: str) -> None:
    config = dict(optimizer=dict(type="SGD", lr=0.1), train=dict(steps=3, global_batch_size=SAMPLES), device="cpu")
    engine = colossus.initialize(config, model=lambda: Net(kind), loss_fn=lambda y, ids: (y.sum(), len(y)))
    for bad in (ROWS, -1):
        ids = torch.ones(SAMPLES, 3, dtype=torch.int64)
        ids[4, 2] = bad
        with pytest.raises(ValueError, match=rf"'table.weight' has ids 0..{ROWS - 1}, but was given id {bad}: make"):
            engine.model(ids)
    engine.close()
