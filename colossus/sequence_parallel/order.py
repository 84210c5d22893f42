"""Which tokens of a sequence each rank holds. Pure arithmetic, no torch.

A sequence is split over R ring ranks (outer) times U Ulysses ranks (inner). With causal attention late tokens look at
more keys than early ones, so a ring rank takes one early and one late part (the zigzag): of 2 R equal chunks ring rank
i has chunk i, its head, and chunk 2 R - 1 - i, its tail. Put side by side over the ring ranks these give the permuted
sequence, and rank (i, j) has part j of the U equal parts of what belongs to ring rank i.
"""

from __future__ import annotations

import math
from itertools import chain

from colossus.arithmetic import nearest_multiples


def order(total: int, ring: int) -> list[int]:
    """Token indices in permuted order: cut into R U equal parts, they are what the ranks hold.

    Args:
        total: tokens of the sequence.
        ring: ring ranks; with one the sequence stays as it is.
    """
    return list(chain.from_iterable(_ring_tokens(total, ring, index) for index in range(ring)))


def local_indices(total: int, ring: int, ulysses: int, ring_index: int, ulysses_index: int) -> list[int]:
    """Token indices that one rank holds, in the order in which it holds them.

    Raises:
        ValueError: when the sequence does not divide.
    """
    require_divisible(total, ring, ulysses)
    size = total // (ring * ulysses)
    return _ring_tokens(total, ring, ring_index)[ulysses_index * size :][:size]


def unit_of(ring: int, ulysses: int) -> int:
    """What the length of a sequence must be a multiple of."""
    return math.lcm(2 * ring, ring * ulysses) if ring > 1 else ulysses


def require_divisible(total: int, ring: int, ulysses: int) -> None:
    """Check that a sequence splits evenly.

    Raises:
        ValueError: when it does not, with the lengths nearest to it that do.
    """
    unit = unit_of(ring, ulysses)
    if total % unit == 0:
        return
    lengths = " and ".join(map(str, nearest_multiples(total, unit)))
    chunks = f"{2 * ring} chunks, an early and a late one for each rank of the ring" if ring > 1 else ""
    parts = f"{ulysses} parts for the ranks that exchange heads" if ulysses > 1 else ""
    why = f"{chunks}, then {parts}" if chunks and parts else chunks or parts
    raise ValueError(
        f"a sequence of {total} tokens does not split over {ring} x {ulysses} = {ring * ulysses} sequence ranks "
        f"(ring x ulysses): its length must be a multiple of {unit} ({why}); the nearest that is: {lengths}"
    )


def _ring_tokens(total: int, ring: int, index: int) -> list[int]:
    if ring == 1:
        return list(range(total))
    chunk = total // (2 * ring)
    starts = (index * chunk, (2 * ring - 1 - index) * chunk)
    return [token for start in starts for token in range(start, start + chunk)]
