"""Ring and Ulysses: which rank holds which tokens, what is sent, and which of the two sends less. No torch.

A sequence is split over R ring ranks (outer) times U Ulysses ranks (inner). Under a causal mask late tokens look at
more keys than early ones, so each ring rank takes an early and a late chunk of the sequence (the zigzag): of 2 R equal
chunks ring rank i has chunk i, its head, and chunk 2 R - 1 - i, its tail. Concatenated over the ring ranks these give
the sequence in zigzag order, and rank (i, j) has shard i U + j of R U equal shards of that.

The work of packed documents has many triangles in place of one: then a rank takes more chunks, two of each 2 R of the
sequence in turn, so that each rank has tokens of all documents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from colossus.arithmetic import nearest_multiples
from colossus.comm import accounting


def chunks_of(rank: int, ring: int, chunks: int = 2) -> list[int]:
    """Return the numbers of a ring rank's chunks, rising: two of each turn, to and fro over the ranks."""
    if ring == 1:
        return [0]
    return [turn + number for turn in range(0, ring * chunks, 2 * ring) for number in (rank, 2 * ring - 1 - rank)]


def zigzag_order(num_tokens: int, ring: int, chunks: int = 2) -> list[int]:
    """Token indices in zigzag order: cut into R U equal shards, they are what the ranks hold.

    Args:
        num_tokens: of the sequence.
        ring: ring ranks; with one the sequence stays as it is.
        chunks: of each ring rank.
    """
    chunk = num_tokens // (chunks * ring) if ring > 1 else num_tokens
    starts = [number * chunk for rank in range(ring) for number in chunks_of(rank, ring, chunks)]
    return [token for start in starts for token in range(start, start + chunk)]


def length_multiple(ring: int, ulysses: int, chunks: int = 2) -> int:
    """Return the number of which the length of a sequence must be a multiple."""
    return math.lcm(chunks * ring, ring * ulysses) if ring > 1 else ulysses


def require_divisible(num_tokens: int, ring: int, ulysses: int, chunks: int = 2) -> None:
    """Raise ValueError for a sequence that does not split evenly, with the lengths nearest to it that do."""
    multiple = length_multiple(ring, ulysses, chunks)
    if num_tokens % multiple:
        lengths = " and ".join(map(str, nearest_multiples(num_tokens, multiple)))
        raise ValueError(
            f"a sequence of {num_tokens} tokens does not split over {ring} x {ulysses} = {ring * ulysses} sequence "
            f"ranks (ring x ulysses): its length must be a multiple of {multiple}; the nearest that is: {lengths}"
        )


@dataclass(frozen=True)
class AttentionTraffic:
    """Elements that one rank sends for one attention, in forward and in backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def attention_traffic(
    tokens: int, heads: int, kv_heads: int, head_dim: int, *, ring: int = 1, ulysses: int = 1
) -> AttentionTraffic:
    """Elements sent by a rank for queries, keys, values and outputs, documents not counted.

    Ulysses sends queries, keys, values and outputs by all-to-all, in backward their gradients. Round the ring go keys
    and values, in backward once more, followed by their gradients: a rank's block comes to every other rank, as in an
    all-gather.

    Args:
        tokens: of the whole sequence, times the samples of a batch.
        heads, kv_heads: of one tensor rank, before they are split further.
        ring, ulysses: ranks of either kind; both above one is the hybrid, one of each sends nothing.
    """
    local = tokens / (ring * ulysses)
    exchanged = accounting.sent("all_to_all", ulysses, local * 2 * (heads + kv_heads) * head_dim)
    # the exchange gives a rank more tokens of fewer key and value heads: as many elements as before
    passed = accounting.sent("all_gather", ring, local * 2 * kv_heads * head_dim)
    return AttentionTraffic(exchanged + passed, exchanged + 2 * passed)


def cheaper(tokens: int, heads: int, kv_heads: int, head_dim: int, ranks: int) -> str:
    """``ring`` or ``ulysses``: what sends less over this many ranks; Ulysses only where the heads divide."""
    if heads % ranks or kv_heads % ranks:
        return "ring"
    by_ring = attention_traffic(tokens, heads, kv_heads, head_dim, ring=ranks)
    by_ulysses = attention_traffic(tokens, heads, kv_heads, head_dim, ulysses=ranks)
    return "ulysses" if by_ulysses.total < by_ring.total else "ring"


class SequenceMode:
    """Tokens are split over all axes of a mode; they differ in how attention looks past the tokens of a rank.

    Attributes:
        ring: axes round which keys and values are passed (outer).
        ulysses: axes over which tokens are exchanged for heads (inner).
    """

    name = ""
    ring: tuple[str, ...] = ()
    ulysses: tuple[str, ...] = ()

    @classmethod
    def axis_sizes(cls, size: int, ulysses: int | None = None) -> dict[str, int]:
        """Size of each atomic axis, outermost first, for ``size`` ranks.

        Args:
            ulysses: ranks of the inner axis, for a mode that has both.

        Raises:
            ValueError: when ``size`` does not factor so.
        """
        if ulysses is not None:
            raise ValueError(
                f"parallel.sequence.ulysses = {ulysses} has no effect in mode {cls.name!r}; it is for mode 'hybrid'"
            )
        return {"sequence": size}

    @classmethod
    def ways(cls, size: int, ulysses: int | None = None) -> tuple[int, int]:
        """Return the ring ranks and the Ulysses ranks of ``size`` ranks; see `axis_sizes`."""
        sizes = cls.axis_sizes(size, ulysses)
        return math.prod(sizes[axis] for axis in cls.ring), math.prod(sizes[axis] for axis in cls.ulysses)


class Ring(SequenceMode):
    name = "ring"
    ring = ("sequence",)


class Ulysses(SequenceMode):
    name = "ulysses"
    ulysses = ("sequence",)


class Hybrid(SequenceMode):
    """Ulysses among neighbouring ranks, and a ring across (2405.07719)."""

    name = "hybrid"
    ring = ("ring",)
    ulysses = ("ulysses",)

    @classmethod
    def axis_sizes(cls, size: int, ulysses: int | None = None) -> dict[str, int]:
        # by itself as near to a square as can be
        inner = ulysses or max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
        if size % inner:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"parallel.sequence.ulysses = {inner} does not divide parallel.sequence.size = {size}; use one of "
                f"{divisors}"
            )
        return {"ring": size // inner, "ulysses": inner}
