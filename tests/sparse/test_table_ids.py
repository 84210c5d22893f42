"""Ids of 32 bits, a table that some ranks use, a parameter of a user beside a table: as in one process, by all ways."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.two_tables import CLASSES, DIM, ROWS, batch_of, loss_fn
from torch import Tensor, nn

import colossus
from colossus import layers

SAMPLES = 8


class Shifted(nn.Embedding):
    """With a parameter of a user's own beside the table."""

    def __init__(self) -> None:
        super().__init__(ROWS, DIM, sparse=True)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.bias


class Words(nn.Module):
    """
    Args:
        everywhere: all ranks look up in ``rare``, be it no id; else those that have ids for it.
    """

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, DIM, padding_idx=2, sparse=True)
        self.plain = Shifted()
        self.rare, self.everywhere = nn.Embedding(ROWS, DIM, sparse=True), everywhere
        self.out = layers.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.table(ids) + self.plain(ids.int() // 2)).mean(1)
        (samples,) = (ids[:, 0] >= 34).nonzero(as_tuple=True)
        if self.everywhere or len(samples):
            x = x.index_add(0, samples, self.rare(ids[samples, 0].int()).to(x.dtype))
        return self.out(x)


def train(rank: int, data: int, way: str, microbatches: int) -> dict[str, Tensor]:
    strategy = dict(type="hybrid", ways={"*": way}) if data > 1 else dict(type="all_reduce")
    config = dict(
        parallel=dict(data=data, strategy=strategy),
        optimizer=dict(type="SGD", lr=0.5),
        schedule=dict(microbatches=microbatches),
        train=dict(steps=4, global_batch_size=SAMPLES, precision="fp64"),
    )
    engine = colossus.initialize(config, model=lambda: Words(way == "owners"), loss_fn=loss_fn)
    found = {}
    for number in range(4):
        result = engine.train_step(batch_of(number, SAMPLES, engine.context.index("data"), data))
        found[f"loss {number}"] = torch.tensor(result.loss, dtype=torch.float64)
        found[f"norm {number}"] = torch.tensor(result.grad_norm, dtype=torch.float64)
    engine.close()
    return found


@pytest.mark.parametrize("way", ["dense", "gather", "owners"])
def test_a_table_is_trained_as_in_one_process(way: str) -> None:
    expected = run_ranks(1, train, 1, way, 1, with_context=False)[0]
    for found in run_ranks(2, train, 2, way, 2, with_context=False):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
