"""The number of partitions is found from times of steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.engine.sparse.partition_search import PartitionFit, PartitionSearch


def time_of(parts: int, a: float = 0.02, b: float = 8.0, c: float = 1.0) -> float:
    return b / parts + a * (parts - 1) + c


def searched(low: int, high: int, seconds: Callable[[int], float]) -> PartitionSearch:
    search = PartitionSearch(low, high)
    for _ in range(40):
        if search.fit is not None:
            return search
        search.record(seconds(search.parts))
    raise AssertionError("the search does not end")


def test_the_search_finds_the_minimum() -> None:
    search = searched(2, 1000, time_of)
    assert search.fit is not None
    assert list(search.fit.times) == [2, 4, 8, 16, 32]  # 32 takes longer than 16
    assert (search.fit.a, search.fit.b, search.fit.c) == pytest.approx((0.02, 8.0, 1.0), rel=1e-9)
    assert search.parts == 20
    assert "t(P) = 8 / P + 0.02 (P - 1) + 1 s" in str(search.fit)


@given(seed=st.integers(0, 10_000))
def test_noise_moves_it_a_little(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.003, 2000)
    assert 16 <= searched(2, 1000, lambda parts: time_of(parts) + noise[parts]).parts <= 25


@given(
    a=st.floats(1e-4, 1.0),
    b=st.floats(0.1, 100.0),
    c=st.floats(0.0, 10.0),
    low=st.integers(1, 8),
    spread=st.integers(4, 99),
)
def test_any_curve_of_this_form_is_found(a: float, b: float, c: float, low: int, spread: int) -> None:
    search = searched(low, low * spread, lambda parts: time_of(parts, a, b, c))
    best = min(max(round((b / a) ** 0.5), low), low * spread)
    assert abs(search.parts - best) <= 1


def test_what_has_no_minimum() -> None:
    assert searched(3, 50, lambda parts: 1.0).parts == 3  # the same for all
    assert searched(3, 50, lambda parts: 1 / parts).parts == 50  # a partition costs nothing
    assert searched(3, 50, lambda parts: 0.1 * parts).parts == 3  # it shares no work
    assert searched(4, 4, time_of).parts == 4
    assert searched(4, 2, time_of).parts == 4  # a table has fewer rows than owners: the owners
    assert searched(2, 4, time_of).parts == 4
    assert PartitionFit.of({2: 1.0}).best(2, 8) == 2
