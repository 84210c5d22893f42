"""The number of partitions is found from times of steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colossus.sparse.balance import best_partitions


def time_of(parts: int, a: float = 0.02, b: float = 8.0, c: float = 1.0) -> float:
    return b / parts + a * (parts - 1) + c


def searched(low: int, high: int, seconds: Callable[[int], float]) -> int:
    """As `Balance` tries numbers."""
    times = {low: seconds(low)}
    while (last := list(times)[-1]) < high:
        parts = min(2 * last, high)
        times[parts] = seconds(parts)
        if len(times) > 2 and times[parts] > times[last]:
            break
    return best_partitions(times, low, high)


def test_the_search_finds_the_minimum() -> None:
    assert searched(2, 1000, time_of) == 20


@given(seed=st.integers(0, 10_000))
def test_noise_moves_it_a_little(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.003, 2000)
    assert 16 <= searched(2, 1000, lambda parts: time_of(parts) + noise[parts]) <= 25


@given(
    a=st.floats(1e-4, 1.0),
    b=st.floats(0.1, 100.0),
    c=st.floats(0.0, 10.0),
    low=st.integers(1, 8),
    spread=st.integers(4, 99),
)
def test_any_curve_of_this_form_is_found(a: float, b: float, c: float, low: int, spread: int) -> None:
    best = min(max(round((b / a) ** 0.5), low), low * spread)
    assert abs(searched(low, low * spread, lambda parts: time_of(parts, a, b, c)) - best) <= 1


def test_what_has_no_minimum() -> None:
    assert searched(3, 50, lambda parts: 1.0) == 3  # the same for all
    assert searched(3, 50, lambda parts: 1 / parts) == 50  # a partition costs nothing
    assert searched(3, 50, lambda parts: 0.1 * parts) == 3  # it shares no work
    assert searched(4, 4, time_of) == 4
    assert searched(2, 4, time_of) == 4
    assert best_partitions({2: 1.0}, 2, 8) == 2
