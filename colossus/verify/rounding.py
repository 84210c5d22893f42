"""The scale of differences between two runs, and an estimate of what rounding explains of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

#: the smallest scale of a difference, as a fraction of the common norm of all tensors of the kind
FLOOR = 1e-3
#: factor by which the estimate may be too low
SAFETY = 4.0


def rounding_bound(dtype: torch.dtype, depth: int, terms: int) -> float:
    """Return the relative difference between two right runs that rounding explains.

    Each of ``depth`` operators in turn rounds its output (half an eps of its dtype) and sums so many terms in its
    accumulator, fp32 for the 16-bit dtypes, whose rounding errors add up as a random walk (Higham & Mary,
    SIAM J. Sci. Comput. 41(5), 2019: sqrt(n) u in place of n u); errors of operators are independent, so they
    add up as a random walk, too. Forward and backward have as many.
    """
    inner = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    of_operator = torch.finfo(dtype).eps / 2 + torch.finfo(inner).eps / 2 * math.sqrt(max(terms, 1))
    return SAFETY * math.sqrt(2 * max(depth, 1)) * of_operator


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the common norm of the finite elements."""
    return math.sqrt(sum(tensor.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item() for tensor in tensors))
