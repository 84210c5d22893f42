"""The numbers of a gradient, dense or of rows."""

from __future__ import annotations

from torch import Tensor


def values_of(gradient: Tensor) -> Tensor:
    """All numbers of a gradient that are not 0 for certain, as a tensor that shares its memory.

    Args:
        gradient: dense, or coalesced COO, as tables have it.
    """
    return gradient._values() if gradient.is_sparse else gradient
