"""What rounding explains: an estimate of how far two right runs are apart."""

from __future__ import annotations

import math

import torch

#: how far the estimate may be off
SAFETY = 4.0


def rounding_bound(dtype: torch.dtype, depth: int, terms: int) -> float:
    """Return the relative difference between two right runs that rounding explains.

    Each of ``depth`` operators in turn rounds its output (half an eps of its dtype) and sums so many terms in its
    accumulator, fp32 for the 16-bit dtypes, whose rounding errors add up as a random walk (Higham & Mary,
    SIAM J. Sci. Comput. 41(5), 2019: sqrt(n) u in place of n u); errors of operators are independent, so they
    add up as a random walk, too. Forward and backward have as many.
    """
    inner = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    each = torch.finfo(dtype).eps / 2 + torch.finfo(inner).eps / 2 * math.sqrt(max(terms, 1))
    return SAFETY * math.sqrt(2 * max(depth, 1)) * each
