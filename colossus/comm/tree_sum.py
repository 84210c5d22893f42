"""Sums in a tree: its shape depends on the number of terms only, so that ranks may add parts of it on their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, neighbours first: ((0 + 1) + (2 + 3)) + ..

    Of 2^n terms, each aligned run of 2^m is a subtree. So where ranks have such runs, the sum of the ranks' sums has
    the bits of the sum of all terms.
    """
    level = list(terms)
    while len(level) > 1:
        pairs = [level[index] + level[index + 1] for index in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]
