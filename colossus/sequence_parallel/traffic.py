"""What sequence parallelism sends, counted beforehand. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank sends for one attention."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)


def traffic(tokens: int, heads: int, kv_heads: int, head_dim: int, *, ring: int = 1, ulysses: int = 1) -> Traffic:
    """Elements sent by a rank for queries, keys, values and outputs, documents not counted.

    Args:
        tokens: of the whole sequence, times the samples of a batch.
        heads, kv_heads: of one tensor rank, before they are split further.
        ring, ulysses: ranks of either kind; both above one is the hybrid, one of each sends nothing.
    """
    exchanged = (ulysses - 1) / ulysses * tokens / (ring * ulysses) * 2 * (heads + kv_heads) * head_dim
    travelled = 2 * (ring - 1) / ring * tokens * kv_heads / ulysses * head_dim
    return Traffic(exchanged, exchanged) + Traffic(travelled, 2 * travelled)


def document_traffic(tokens: int, *, ring: int = 1, ulysses: int = 1) -> Traffic:
    """Document numbers sent by a rank: gathered over the Ulysses ranks, and twice round the ring with the keys."""
    gathered = (ulysses - 1) * tokens / (ring * ulysses)
    travelled = (ring - 1) / ring * tokens
    return Traffic(gathered + travelled, travelled)


def cheaper(tokens: int, heads: int, kv_heads: int, head_dim: int, ranks: int) -> str:
    """``ring`` or ``ulysses``: what sends less over this many ranks; Ulysses only where the heads divide."""
    if heads % ranks or kv_heads % ranks:
        return "ring"
    by_ring = traffic(tokens, heads, kv_heads, head_dim, ring=ranks)
    by_ulysses = traffic(tokens, heads, kv_heads, head_dim, ulysses=ranks)
    return "ulysses" if by_ulysses.total < by_ring.total else "ring"
