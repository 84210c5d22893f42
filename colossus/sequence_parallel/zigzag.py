"""Which tokens of a sequence each rank holds. Pure arithmetic, no torch.

A sequence is split over R ring ranks (outer) times U Ulysses ranks (inner). Under a causal mask late tokens look at
more keys than early ones, so each ring rank takes an early and a late chunk of the sequence (the zigzag): of 2 R equal
chunks ring rank i has chunk i, its head, and chunk 2 R - 1 - i, its tail. Concatenated over the ring ranks these give
the sequence in zigzag order, and rank (i, j) has shard i U + j of R U equal shards of that.
"""

from __future__ import annotations

import math

from colossus.arithmetic import nearest_multiples


def zigzag_order(num_tokens: int, ring: int) -> list[int]:
    """Token indices in zigzag order: cut into R U equal shards, they are what the ranks hold.

    Args:
        num_tokens: of the sequence.
        ring: ring ranks; with one the sequence stays as it is.
    """
    if ring == 1:
        return list(range(num_tokens))
    chunk = num_tokens // (2 * ring)
    starts = [number * chunk for index in range(ring) for number in (index, 2 * ring - 1 - index)]
    return [token for start in starts for token in range(start, start + chunk)]


def length_multiple(ring: int, ulysses: int) -> int:
    """The number that the length of a sequence must be a multiple of."""
    return math.lcm(2 * ring, ring * ulysses) if ring > 1 else ulysses


def require_divisible(num_tokens: int, ring: int, ulysses: int) -> None:
    """Check that a sequence splits evenly.

    Raises:
        ValueError: when it does not, with the lengths nearest to it that do.
    """
    multiple = length_multiple(ring, ulysses)
    if num_tokens % multiple == 0:
        return
    lengths = " and ".join(map(str, nearest_multiples(num_tokens, multiple)))
    chunks = f"{2 * ring} chunks, an early and a late one for each rank of the ring" if ring > 1 else ""
    parts = f"{ulysses} parts for the ranks that exchange heads" if ulysses > 1 else ""
    why = f"{chunks}, then {parts}" if chunks and parts else chunks or parts
    raise ValueError(
        f"a sequence of {num_tokens} tokens does not split over {ring} x {ulysses} = {ring * ulysses} sequence ranks "
        f"(ring x ulysses): its length must be a multiple of {multiple} ({why}); the nearest that is: {lengths}"
    )
