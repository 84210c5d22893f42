"""Sums of squares that are exact, so that their bits depend on no order: as integers in base 2^32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: exponents of the digits of a sum of squares, each below 2^32: squares from 2^-138 to 2^86, of gradients above 2^-69
_EXPONENTS = (54, 22, -10, -42, -74, -106, -138)
#: their number
NUM_DIGITS = len(_EXPONENTS)
_BASE = 2**32


def square_digits(values: Tensor) -> Tensor:
    """Return the sum of the squares of some values, exact in base 2^32: float64 [7], highest first; nan: not finite.

    The digits of several tensors may be added up in any order, see `square_of`.
    """
    rest = values.reshape(-1).double().square()
    bad = (rest * 0.0).sum()
    rest = torch.nan_to_num(rest, nan=0.0, posinf=0.0)
    digits = []
    for exponent in _EXPONENTS:
        digit = torch.floor(rest * 2.0**-exponent)
        rest = rest - digit * 2.0**exponent
        digits.append(digit.long().sum())
    carried = torch.stack(_carried(digits)).double()
    return torch.cat((carried[:1] + bad, carried[1:]))


def square_of(digits: Tensor) -> Tensor:
    """Return the number of a sum of `square_digits`: a float64 scalar that depends on its value only."""
    bad = digits[0] * 0.0
    carried = _carried(list(torch.nan_to_num(digits).long().unbind()))
    total = bad
    for digit, exponent in reversed(list(zip(carried, _EXPONENTS, strict=True))):
        total = total + digit.double() * 2.0**exponent
    return total


def _carried(digits: Sequence[Tensor]) -> list[Tensor]:
    """Return integer digits, highest first, with all but the highest below the base."""
    carried: list[Tensor] = []
    carry: Tensor | int = 0
    for digit in reversed(digits[1:]):
        digit = digit + carry
        carry = digit // _BASE
        carried.insert(0, digit - carry * _BASE)
    return [digits[0] + carry, *carried]
