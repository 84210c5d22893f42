"""Metrics of tables: bytes by way, rows touched and alpha are those of the ids; and who is told of a better way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.comm import accounting
from colossus.sparse.cost import WAYS, WayName, bytes_sent

ROWS, DIM, SAMPLES, RANKS, BYTES = 41, 3, 4, 3, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Embedding(ROWS, DIM, sparse=True) for _ in range(3))
        self.out = nn.Linear(DIM, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.a(ids) + self.b(ids // 2) + self.c(ids // 3))


def loss(y: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    return y.square().sum(), len(y)


def ids_of(rank: int, step: int) -> Tensor:
    return torch.randint(0, ROWS, (SAMPLES, 2), generator=torch.Generator().manual_seed(10 * rank + step))


def _config(**strategy: Any) -> dict[str, Any]:
    return dict(
        parallel=dict(data=RANKS, strategy=dict(type="hybrid", **strategy)),
        optimizer=dict(type="SGD", lr=0.01),
        schedule=dict(microbatches=2),
        train=dict(steps=30, global_batch_size=RANKS * SAMPLES, precision="fp64"),
    )


def _counted(rank: int) -> list[dict[str, float]]:
    engine = colossus.initialize(
        _config(ways={"a.*": "owners", "b.*": "gather", "c.*": "dense"}), model=Net, loss_fn=loss
    )
    reports = []
    for step in range(2):
        engine.train_step(ids_of(rank, step))
        reports.append(engine.strategy.report())
    owners = next(iter(engine.strategy.tables)).way.placement  # type: ignore[union-attr]
    reports.append({str(row): float(owner) for row, owner in _owners(owners).items()})
    return reports


def _owners(placement: Any) -> dict[int, int]:
    spans = zip(placement.owners, pairwise(placement.bounds), strict=True)
    return {row: owner for owner, span in spans for row in range(*span)}


def test_what_is_reported_is_what_the_ids_say() -> None:
    found = run_ranks(RANKS, _counted, with_context=False)
    owner = {int(row): int(rank) for row, rank in found[0][2].items()}
    assert len(set(owner.values())) == RANKS
    for step in range(2):
        ids = [ids_of(rank, step) for rank in range(RANKS)]
        touched = [set(each.unique().tolist()) for each in ids]
        for rank in range(RANKS):
            report = found[rank][step]
            given = sum(owner[row] != rank for row in touched[rank])  # gradients for their owners
            served = sum(owner[row] == rank for other in range(RANKS) if other != rank for row in touched[other])
            gathered = len((ids[rank] // 2).unique())
            assert report["bytes_owned_rows"] == (given + served) * DIM * BYTES
            assert report["bytes_gathered_rows"] == gathered * (RANKS - 1) * DIM * BYTES
            dense = ROWS * DIM + 5 * DIM + 5
            assert report["bytes_dense"] == pytest.approx(2 * dense * BYTES * (RANKS - 1) / RANKS)
            assert report["alpha.a.weight"] == len(touched[rank]) / ROWS
            assert report["rows_touched"] == len(touched[rank]) + gathered + len((ids[rank] // 3).unique())


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def _chosen_and_sent(rank: int, way: WayName, precision: Any) -> tuple[float, float]:
    """Bytes of a way by the formula, and as they were counted, on all ranks together."""
    config = _config(ways={"*": way})
    config["schedule"] = dict(microbatches=1)
    config["train"]["precision"] = precision
    engine = colossus.initialize(config, model=Table, loss_fn=loss)
    with accounting.count() as meter:
        engine.train_step(torch.arange(ROWS).expand(SAMPLES, -1))
    operation = {"owners": "all_to_all rows", "gather": "all_gather rows", "dense": "all_reduce"}[way]
    table = engine.strategy.choices["table.weight"].table  # type: ignore[attr-defined]
    chosen = bytes_sent(way, RANKS, table.size, 1.0)
    return chosen, sum(
        tally.bytes for (name, _, dtype), tally in meter.entries.items() if (name, dtype) == (operation, torch.float32)
    )


@pytest.mark.rest("fp32")
@pytest.mark.parametrize("precision", ["fp32", dict(params="bf16", compute="bf16")], ids=["fp32", "bf16"])
def test_the_formula_counts_the_bytes_that_travel(precision: Any) -> None:
    """All ranks touch all rows; tables are stored as wide as the optimizer's state under any ``params``."""
    for way in WAYS:
        found = run_ranks(RANKS, _chosen_and_sent, way, precision, with_context=False)
        assert sum(chosen for chosen, _ in found) == pytest.approx(sum(sent for _, sent in found), rel=0.01), way
