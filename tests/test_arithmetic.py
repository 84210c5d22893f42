"""Arithmetic of sizes, as messages show it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.arithmetic import either, nearest_multiples, nearest_powers, not_a_multiple, parse_seconds, round_up


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_nearest_multiples_are_on_either_side(value: int, unit: int) -> None:
    near = nearest_multiples(value, unit)
    assert all(number % unit == 0 and number > 0 for number in near)
    assert all(abs(number - value) < unit or value == 0 for number in near)
    assert (near == [value]) == (value % unit == 0 and value > 0)
    assert len(near) == (1 if value <= unit or value % unit == 0 else 2)
    assert round_up(value, unit) == (near[-1] if value else 0)


@given(st.integers(1, 10_000), st.sampled_from([2, 3]))
def test_nearest_powers_are_on_either_side(value: int, exponent: int) -> None:
    low, high = nearest_powers(value, exponent)
    assert low <= value < high
    assert [round(number ** (1 / exponent)) ** exponent for number in (low, high)] == [low, high]
    assert round(high ** (1 / exponent)) - round(low ** (1 / exponent)) == 1


@pytest.mark.parametrize(("value", "near"), [(30, "28 or 32"), (2, "4"), (4, "4")])
def test_wording(value: int, near: str) -> None:
    assert either(nearest_multiples(value, 4)) == near
    words = not_a_multiple("seq_len", value, "size = 4", 4)
    assert words == f"seq_len = {value} is not a multiple of size = 4; nearest: {near}"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("30 m", 1800), ("2d", 172_800), (40, 40)])
def test_times(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "0", "-1s", "1y", "nan", True])
def test_what_is_no_time(text: str | float) -> None:
    with pytest.raises(ValueError, match="is no time; write 90s, 30m, 1h"):
        parse_seconds(text)
