"""The choice of the way of a table: the formula, ties, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.sparse.choice import SMALL_BYTES, Survey, TableFacts, bytes_sent, choose, way_problems

TABLE = TableFacts("table.weight", (10_000, 64), (10_000, 64), 8, 4)
# -- the formula ------------------------------------------------------------------------------------------------


def test_the_formula_in_numbers() -> None:
    """w = 800 bytes, N = 5, alpha = 1/4: 2 w (N-1)/N, alpha w (N-1), 2 alpha w (N-1)/N."""
    assert bytes_sent("dense", 5, 800, 0.25) == 1280
    assert bytes_sent("gather", 5, 800, 0.25) == 800
    assert bytes_sent("owners", 5, 800, 0.25) == 320


@given(st.integers(2, 64), st.floats(0, 1, allow_subnormal=False), st.integers(1, 10**9))
def test_owners_never_send_more(parties: int, touched: float, size: int) -> None:
    owners, gather, dense = (bytes_sent(way, parties, size, touched) for way in ("owners", "gather", "dense"))
    assert owners <= gather * (1 + 1e-12)
    assert owners <= dense * (1 + 1e-12)


# -- the choice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "way"),
    [
        (TABLE, "owners"),
        (replace(TABLE, ranks=2), "owners"),  # as few bytes as gather, and the table is held once
        (replace(TABLE, ranks=1), "dense"),
        (replace(TABLE, local_shape=(SMALL_BYTES // 8, 1)), "dense"),
        (replace(TABLE, local_shape=(SMALL_BYTES // 8 + 1, 1)), "owners"),
        (replace(TABLE, local_shape=(3, 10_000)), "dense"),  # fewer rows than ranks
        (replace(TABLE, tied="head (Linear)"), "dense"),
    ],
)
def test_tables_are_owned_unless_something_speaks_against_it(table: TableFacts, way: str) -> None:
    assert choose(table).way == way
    if table.tied is None:
        assert choose(table, "gather").way == "gather"  # the user has the last word


# -- what is refused --------------------------------------------------------------------------------------------


SURVEY = Survey(
    (TABLE, replace(TABLE, name="few.weight", local_shape=(3, 64)), replace(TABLE, name="t.weight", tied="head")),
)


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        ({"few.*": "owners"}, "'few.weight' has 3 rows, fewer than the 4 ranks that would own them: use 'gather' or"),
        ({"t.weight": "owners"}, "'t.weight' is tied to head, whose gradient is of every row"),
        ({"t.weight": "gather"}, "'t.weight' is tied to head"),
        ({"zzz": "dense"}, "fits no table with sparse=True; the tables are 'table.weight', 'few.weight', 't.weight'"),
    ],
)
def test_ways_that_a_table_cannot_take(ways: dict[str, Any], words: str) -> None:
    (problem,) = way_problems(ways, SURVEY)
    assert problem.startswith("parallel.strategy.ways: ")
    assert words in problem


def test_ways_that_fit() -> None:
    assert not way_problems({"few.*": "gather", "t.*": "dense", "*": "owners"}, SURVEY)  # the first that fits
