"""What sequence parallelism sends, counted beforehand. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.comm import accounting


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
