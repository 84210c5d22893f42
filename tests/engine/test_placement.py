"""Which owner has which rows: even loads, and rows that move without a trace in the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.long import long
from helpers.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.sparse import balance
from colossus.sparse.balance import imbalance
from colossus.sparse.placement import PARTS_PER_OWNER, Placement, bins_for

ROWS, DIM, CLASSES, SAMPLES = 41, 4, 5, 12


@given(data=st.data(), num_rows=st.integers(1, 300), owners=st.integers(1, 9), parts=st.integers(1, 40))
def test_every_row_has_one_owner_and_one_place(data: st.DataObject, num_rows: int, owners: int, parts: int) -> None:
    counts = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=min(num_rows, 60)))
    for placement in (
        Placement.equal(num_rows, owners, parts),
        Placement.balanced(counts, num_rows, owners, max(parts, owners)),
    ):
        places: list[tuple[int, int]] = []
        for (start, stop), owner, offset in zip(
            zip(placement.bounds, placement.bounds[1:], strict=False), placement.owners, placement.offsets, strict=True
        ):
            places += [(owner, offset + i) for i in range(stop - start)]
        assert len(set(places)) == len(places) == num_rows == placement.num_rows
        assert placement.owners_of(np.arange(num_rows)).tolist() == [owner for owner, _ in places]
        for owner in range(owners):
            stored = [row for start, stop in placement.intervals(owner) for row in range(start, stop)]
            assert len(stored) == placement.rows(owner)
            assert [places[row] for row in stored] == [(owner, place) for place in range(len(stored))]
        assert sum(placement.loads(counts, owners)) == pytest.approx(sum(counts))


def zipf(num_rows: int, num_ids: int, seed: int) -> np.ndarray[Any, Any]:
    chances = 1 / np.arange(1, num_rows + 1)
    return np.random.default_rng(seed).choice(num_rows, num_ids, p=chances / chances.sum())


@pytest.mark.parametrize("owners", [2, 4, 7])
def test_a_hot_row_is_no_bottleneck(owners: int) -> None:
    """Of 100,000 rows by Zipf's law, each rank's distinct ids in each of some steps, as frequent words come first."""
    rows, steps, counted = 100_000, 10, np.zeros(bins_for(100_000))
    for seed in range(steps * owners):
        counted[np.unique(zipf(rows, 4000, seed))] += 1
    parts = PARTS_PER_OWNER * owners
    equal, balanced = Placement.equal(rows, owners, parts), Placement.balanced(counted, rows, owners, parts)
    fresh = np.zeros(rows)
    for seed in range(1000, 1000 + 5 * owners):
        fresh[np.unique(zipf(rows, 4000, seed))] += 1
    before, after = (imbalance(each.loads(fresh, owners)) for each in (equal, balanced))
    assert before > 0.65 * owners  # the first owner has most of what is touched
    assert after < 1.04
    assert imbalance([balanced.rows(owner) for owner in range(owners)]) < 1.04


# -- rows that move ------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, DIM, padding_idx=2, sparse=True)
        self.plain = nn.Embedding(5, DIM, sparse=True)
        self.out = layers.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids) + self.plain(ids % 5)).mean(1))


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def run(strategy: dict[str, Any], tables: dict[str, Any], steps: int, data: int = 3, **plan: Any) -> dict[str, Any]:
    config = dict(
        parallel=dict(data=data, **plan, strategy=dict(type="hybrid", ways={"*": "owners"}, **strategy)),
        optimizer=dict(type="SGD", lr=0.3, tables=tables),
        train=dict(steps=steps, global_batch_size=SAMPLES, precision="fp64"),
    )
    engine = colossus.initialize(config, model=Words, loss_fn=loss_fn)
    losses = []
    for step in range(steps):
        ids = torch.from_numpy(zipf(ROWS, SAMPLES * 3, step)).view(SAMPLES, 3)
        labels = torch.randint(0, CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(step))
        share, index = SAMPLES // data, engine.context.index("data")
        mine = slice(index * share, (index + 1) * share)
        losses.append(engine.train_step((ids[mine], labels[mine])).loss)
    tables_of = {table.name: table for table in engine.strategy.tables}
    (table,) = (each for name, each in tables_of.items() if name == "table.weight")
    found = dict(
        losses=losses,
        whole=table.way.read(torch.arange(ROWS)),
        state=full_state_dict(engine.model, engine.context),
        shape=tuple(table.param.shape),
        placement=table.way.placement,
        report=engine.strategy.report(),
    )
    engine.close()
    return found


#: the first two run by default: state by row, and state of the table's shape beside a number
RULES: list[dict[str, Any]] = [
    dict(type="RowWiseAdagrad", lr=0.1),
    dict(type="SparseAdam", lr=0.01),
    dict(type="SGD", momentum=0.9),
    dict(type="Adagrad", lr=0.1),
]


def moved_and_not(rank: int, rules: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(run(dict(balance_after=0), rule, 5), run(dict(balance_after=2, partitions=8), rule, 5)) for rule in rules]


@pytest.mark.parametrize("rules", ["first", *long("others")])
def test_rows_and_their_state_move_without_a_trace(rules: str) -> None:
    chosen = RULES[:2] if rules == "first" else RULES[2:]
    by_rank = run_ranks(3, moved_and_not, chosen, with_context=False)
    for rank, cases in enumerate(by_rank):
        for rule, (stayed, moved) in zip(chosen, cases, strict=True):
            assert moved["placement"].owners != stayed["placement"].owners
            assert moved["shape"] == (moved["placement"].rows(rank), DIM)
            assert moved["losses"] == stayed["losses"], rule
            assert torch.equal(moved["whole"], stayed["whole"]), rule
            assert torch.equal(moved["state"]["table.weight"], stayed["whole"]), rule


def moved_beside(rank: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    adagrad = dict(type="RowWiseAdagrad", lr=0.1)
    return [
        (run(dict(balance_after=0), adagrad, 4, **plan), run(dict(balance_after=1), adagrad, 4, **plan))
        for plan in (dict(data=2, tensor=2), dict(data=1, tensor=dict(mode="2d", size=4)))
    ]


def test_rows_move_where_features_are_split() -> None:
    for cases in run_ranks(4, moved_beside, with_context=False):
        for stayed, moved in cases:
            assert moved["placement"].owners != stayed["placement"].owners
            assert moved["losses"] == stayed["losses"]
            assert torch.equal(moved["whole"], stayed["whole"])


def searched(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return run(dict(balance_after=0), RULES[0], 18), run(dict(partitions="search", balance_after=1), RULES[0], 18)


def test_a_search_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "STEPS_EACH", 2)
    for stayed, found in run_ranks(3, searched, with_context=False):
        assert found["losses"] == stayed["losses"]
        assert torch.equal(found["whole"], stayed["whole"])
        assert 3 <= found["report"]["partitions"] <= ROWS
        assert found["placement"].num_parts <= found["report"]["partitions"]
