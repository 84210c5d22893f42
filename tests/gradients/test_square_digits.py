"""Sums of squares that are the same in any order."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossus.gradients.square_digits import NUM_DIGITS, square_digits, square_of

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**40), max_value=2.0**40)


@given(st.lists(numbers, min_size=1, max_size=40), st.randoms())
@settings(max_examples=200, deadline=None)
def test_a_sum_of_squares_depends_on_no_order_and_no_parts(values: list[float], order: random.Random) -> None:
    def of(parts: list[list[float]]) -> float:
        start = torch.zeros(NUM_DIGITS, dtype=torch.float64)
        return float(square_of(sum((square_digits(torch.tensor(part)) for part in parts), start)))

    whole = of([values])
    shuffled = [*values]
    order.shuffle(shuffled)
    middle = len(values) // 2
    assert of([shuffled[:middle], shuffled[middle:]]) == whole == of([[value] for value in reversed(values)])
    exact = sum(Fraction(value) ** 2 for value in values)
    assert abs(Fraction(whole) - exact) <= exact * Fraction(1, 2**50) + len(values) * Fraction(1, 2**138)


def test_a_square_that_is_not_finite_stays_so() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        digits = square_digits(torch.tensor([1.0, bad])) + square_digits(torch.tensor([2.0]))
        assert not math.isfinite(float(square_of(digits)))
