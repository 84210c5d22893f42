"""The choice of the way of a table: the formula, ties, alpha of a batch, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import RankError, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.config import load_config
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.engine.sparse import alphas
from colossus.engine.sparse.choice import (
    SMALL_BYTES,
    Alpha,
    Parties,
    Survey,
    TableFacts,
    choose,
    costs,
    pattern_problems,
    way_problems,
)
from colossus.engine.sparse.cost import bytes_sent, union_of_uniform
from colossus.engine.sparse.lookups import lookups_of

TABLE = TableFacts("table.weight", (10_000, 64), (10_000, 64), 8, 4)
ONE_HOST = Parties()


def alpha(value: float, source: Any = "measured", host: float | None = None) -> Alpha:
    return Alpha(value, value if host is None else host, source)


# -- the formula ------------------------------------------------------------------------------------------------


def test_the_formula_in_numbers() -> None:
    """w = 800 bytes, N = 5, alpha = 1/4: 2 w (N-1)/N, alpha w (N-1), 2 alpha w (N-1)/N."""
    assert bytes_sent("dense", 5, 800, 0.25) == 1280
    assert bytes_sent("gather", 5, 800, 0.25) == 800
    assert bytes_sent("owners", 5, 800, 0.25) == 320
    assert [bytes_sent(way, 1, 800, 0.25) for way in ("dense", "gather", "owners")] == [0, 0, 0]


@given(st.integers(2, 64), st.floats(0, 1, allow_subnormal=False), st.integers(1, 10**9))
def test_owners_never_send_more(parties: int, touched: float, size: int) -> None:
    owners, gather, dense = (bytes_sent(way, parties, size, touched) for way in ("owners", "gather", "dense"))
    assert owners <= gather * (1 + 1e-12)
    assert owners <= dense * (1 + 1e-12)


def test_hosts_send_what_their_ranks_touch_together() -> None:
    table, hosts = replace(TABLE, ranks=8), Parties(hosts=2, aggregate=True)
    found = costs(table, alpha(0.1, host=0.3), hosts)
    assert found == pytest.approx({"owners": 0.3 * table.size, "gather": 0.3 * table.size, "dense": table.size})
    assert costs(table, alpha(0.1, host=0.3), Parties(hosts=2))["owners"] == pytest.approx(2 * 0.1 * table.size * 7 / 8)
    assert union_of_uniform(0.1, 4) == pytest.approx(1 - 0.9**4)


# -- the choice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "touched", "way"),
    [
        (TABLE, alpha(0.01), "owners"),
        (replace(TABLE, ranks=2), alpha(0.01), "owners"),  # as few bytes as gather, and the table is held once
        (TABLE, alpha(1.0), "dense"),  # as few bytes as owners, in one collective
        (TABLE, alpha(1.0, "bound"), "owners"),  # at most as many as dense
        (TABLE, alpha(1.0, "unknown"), "owners"),
        (replace(TABLE, ranks=1), alpha(0.01), "dense"),
        (replace(TABLE, held=(SMALL_BYTES // 8, 1)), alpha(0.01), "dense"),
        (replace(TABLE, held=(SMALL_BYTES // 8 + 1, 1)), alpha(0.01), "owners"),
        (replace(TABLE, held=(3, 10_000)), alpha(0.4), "gather"),  # fewer rows than ranks: below 2 / N
        (replace(TABLE, held=(3, 10_000)), alpha(0.6), "dense"),
        (replace(TABLE, tied="head (Linear)"), alpha(0.01), "dense"),
    ],
)
def test_the_fewest_bytes(table: TableFacts, touched: Alpha, way: str) -> None:
    assert choose(table, touched, ONE_HOST).way == way


def test_the_user_has_the_last_word() -> None:
    for way in ("dense", "gather", "owners"):
        assert choose(TABLE, alpha(0.01), ONE_HOST, way).way == way  # type: ignore[arg-type]


# -- what is refused --------------------------------------------------------------------------------------------


SURVEY = Survey(
    (TABLE, replace(TABLE, name="few.weight", held=(3, 64)), replace(TABLE, name="t.weight", tied="head")),
    ("out.bias",),
)


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        ({"few.*": "owners"}, "'few.weight' has 3 rows, fewer than the 4 ranks that would own them: use 'gather' or"),
        ({"t.weight": "owners"}, "'t.weight' is tied to head, whose gradient is of every row"),
        ({"t.weight": "gather"}, "'t.weight' is tied to head"),
        ({"tabel.weight": "owners"}, "'tabel.weight' fits no table with sparse=True; did you mean 'table.weight'?"),
        ({"out.*": "gather"}, "'out.*' fits no table with sparse=True, but 'out.bias', whose gradient is dense"),
        ({"zzz": "dense"}, "fits no table with sparse=True; the tables are 'table.weight', 'few.weight', 't.weight'"),
    ],
)
def test_ways_that_a_table_cannot_take(ways: dict[str, Any], words: str) -> None:
    (problem,) = way_problems(ways, SURVEY)
    assert problem.startswith("parallel.strategy.ways: ")
    assert words in problem


def test_ways_that_fit() -> None:
    assert not way_problems({"few.*": "gather", "t.*": "dense", "*": "owners"}, SURVEY)  # the first that fits
    assert not pattern_problems("alpha", ["*"], SURVEY)


# -- alpha of a batch -------------------------------------------------------------------------------------------

ROWS, BAGS, SAMPLES, LENGTH = 500, 90, 12, 5


class Words(nn.Module):
    """Ids by arithmetic on the inputs, bags, sampled negatives, masks, dropout, an LSTM, tables that are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(ROWS, 6, sparse=True)
        self.plain = nn.Embedding(ROWS, 6, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(BAGS, 6, sparse=True, mode="sum")
        self.position = nn.Embedding(LENGTH, 6)
        self.drop, self.lstm = layers.Dropout(0.5), nn.LSTM(6, 6, batch_first=True)
        self.head = layers.SampledSoftmax(6, ROWS, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x + self.plain((ids * 7 + 1) % ROWS) + self.bag(ids % BAGS).unsqueeze(1))
        return self.lstm(x)[0]

    def loss(self, y: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return self.head(y, batch["labels"])


def batch_of(seed: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    ids = torch.randint(0, ROWS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"inputs": ids[:, :-1], "labels": torch.where(ids[:, 1:] % 5 == 0, -100, ids[:, 1:])}


CONFIG: dict[str, Any] = dict(
    parallel=dict(data=2, strategy="hybrid"),
    optimizer=dict(type="SGD", lr=0.1),
    schedule=dict(microbatches=2),
    train=dict(steps=2, global_batch_size=2 * SAMPLES, precision="fp64", seed=5),
)


def test_lookups_are_those_of_a_step() -> None:
    """Against what a table's gradient has after a step of torch in one process."""
    batch = batch_of(1)
    (found,) = lookups_of(Words, load_config(CONFIG), [batch])
    touched = {name: set(alphas.distinct(calls)[0].tolist()) for name, calls in found.items()}
    ids = batch["inputs"]
    assert touched["embedding.weight"] == set(ids.unique().tolist())
    assert touched["plain.weight"] == set(((ids * 7 + 1) % ROWS).unique().tolist())
    assert touched["bag.weight"] == set((ids % BAGS).unique().tolist())
    labels = set(batch["labels"].unique().tolist()) - {-100}
    context = ParallelContext.from_config(load_config({**CONFIG, "parallel": {"data": 1}}), connect=False)
    drawn = build(Words, context, materialize=False).head.sample().classes.tolist()  # of step 0
    assert touched["head.weight"] == labels | set(drawn)
    assert touched["head.bias"] == touched["head.weight"]
    assert "position.weight" not in touched


def test_ranks_that_share_samples_touch_their_share() -> None:
    ids = torch.tensor([[1, 1], [2, 3], [3, 3], [9, 1]])
    table = replace(TABLE, shape=(10, 4), ranks=8, per_data=2)
    assert [part.tolist() for part in alphas.distinct([ids], 2)] == [[1, 2, 3], [1, 3, 9]]
    assert alphas.touched(table, [ids]) == pytest.approx(0.3)
    assert alphas.bound(table, 8, Parties(hosts=2, aggregate=True)) == Alpha(0.4, 1.0, "bound")


def test_a_model_that_cannot_run_without_values_has_a_bound() -> None:
    def body(rank: int, way: str) -> tuple[float, str, str]:
        class Sorted(Words):
            def forward(self, ids: Tensor) -> Tensor:
                y = super().forward(ids)
                return y if float(y.detach().sum()) < 1e9 else y * 2  # wants values

        data = [{key: value[0] for key, value in batch_of(seed, 1).items()} for seed in range(64)]
        engine = colossus.initialize(CONFIG, model=Words if way == "measured" else Sorted, data=data)
        choice = engine.strategy.choices["embedding.weight"]
        engine.close()
        return choice.alpha.rank, choice.alpha.source, choice.way

    exact, bounded = (run_ranks(2, body, way, with_context=False) for way in ("measured", "bound"))
    ids = [torch.stack([batch_of(seed, 1)["inputs"][0] for seed in range(64)])]
    assert exact[0] == exact[1]
    assert exact[0][1] == "measured"
    assert 0 < exact[0][0] <= SAMPLES * LENGTH / ROWS < len(alphas.distinct(ids)[0]) / ROWS
    assert bounded[0] == bounded[1] == (SAMPLES * LENGTH / ROWS, "bound", "dense")  # dense: the table is small


# -- tied tables ------------------------------------------------------------------------------------------------


def test_a_table_tied_to_a_head_is_dense() -> None:
    """Its gradient is that of the lookups and of the head together, as in torch."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(SAMPLES, 4, sparse=True)
            self.head = nn.Linear(4, SAMPLES, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embedding(ids)))

    def loss(y: Tensor, ids: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(y, (ids + 1) % SAMPLES, reduction="sum"), len(y)

    def body(rank: int, ranks: int, ways: dict[str, str]) -> list[float]:
        strategy = dict(type="hybrid", ways=ways)
        train = dict(global_batch_size=SAMPLES, precision="fp64", steps=3)
        config = dict(parallel=dict(data=ranks, strategy=strategy), optimizer=dict(type="SGD", lr=1.0), train=train)
        engine = colossus.initialize(config, model=Tied, loss_fn=loss)
        ids = torch.arange(SAMPLES).reshape(ranks, -1)[rank]
        return [engine.train_step(ids).loss for _ in range(3)]

    (expected,) = run_ranks(1, body, 1, {}, with_context=False)
    for found in run_ranks(2, body, 2, {}, with_context=False):
        assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(RankError, match=r"'embedding.weight' is tied to head \(Linear\)"):
        run_ranks(2, body, 2, {"*": "owners"}, with_context=False)
