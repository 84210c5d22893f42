"""Attention of tokens that are split over sequence ranks: heads exchanged inside, a ring across."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.sequence_parallel.ring import ring_attention
from colossus.sequence_parallel.ulysses import to_heads, to_tokens


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """The R U ranks that hold one sequence.

    Attributes:
        ring: the R outer ranks, round which keys and values are passed.
        ulysses: the U inner ranks, which exchange tokens for heads.
    """

    ring: AxisGroup
    ulysses: AxisGroup


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: SequenceGroups,
    *,
    causal: bool,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Exact attention over all tokens of the sequence ranks.

    Inside, a rank holds the U s tokens of the Ulysses ranks for 1 / U of the heads; without a ring that is the whole
    sequence.

    Shape:
        q [batch, heads, s, head_dim], k and v [batch, kv_heads, s, head_dim], the result like q: the s tokens that this
        rank holds, as `order.local_indices` says; the whole sequence has R U s.

    Args:
        causal: a token sees itself and those before it in the sequence.
        documents: integers [batch, s]; a token looks only at tokens with the same number. Padding is a document
            of its own, say -1.
        scale: of the scores, by default head_dim ** -0.5.

    Raises:
        ValueError: when the Ulysses ranks do not divide the heads, or shapes do not fit each other.
    """
    q, k, v = to_heads(q, k, v, groups.ulysses)
    if documents is not None:
        documents = collectives.all_gather(documents, groups.ulysses, dim=1).wait()
    if groups.ring.size > 1 or documents is not None:
        out = ring_attention(q, k, v, groups.ring, causal=causal, documents=documents, scale=scale)
    else:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return to_tokens(out, groups.ulysses)
