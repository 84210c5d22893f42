"""Attention of tokens that are split over sequence ranks: Ulysses (2309.14509) inside, a ring across (2405.07719).

Ulysses exchanges tokens for heads: between its two all-to-alls a rank holds all tokens of the group, for its share of
the heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.conjugate import conjugate
from colossus.comm.kept_results import kept
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.sequence_parallel.mask import CAUSAL, FULL, Mask
from colossus.sequence_parallel.ring_attention import ring_attention

_HEADS, _TOKENS = 1, 2
#: up to here queries, keys and values are exchanged in one call: a small exchange costs its latency, a large one its
#: bytes and the copy that concatenates them (measured: equal at 3 MB)
_COALESCE_BYTES = 4 << 20


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: AxisGroup,
    ulysses: AxisGroup,
    *,
    mask: Mask,
    documents: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunks: int = 2,
) -> Tensor:
    """Exact attention over all tokens of the R U ranks that hold a sequence.

    Inside, a rank holds the U s tokens of the Ulysses ranks for 1 / U of the heads; without a ring that is the whole
    sequence.

    Shape:
        q [batch, heads, s, head_dim], k and v [batch, kv_heads, s, head_dim], the result like q: the s tokens that this
        rank holds, as `SequenceSplit.positions` says; the whole sequence has R U s.

    Args:
        ring: the R outer ranks, round which keys and values are passed.
        ulysses: the U inner ranks, which exchange tokens for heads.
        mask: what a token attends to, by positions in the sequence.
        documents: integers [batch, s]; a token attends only to tokens with the same number. Padding is a document
            of its own, say -1.
        scale: of the scores, by default head_dim ** -0.5.
        soft_cap, sinks, chunks: see `ring_attention`; sinks [heads].

    Raises:
        ValueError: when the Ulysses ranks do not divide the heads, or shapes do not fit each other.
    """
    q, k, v = _to_heads(q, k, v, ulysses)
    if documents is not None:
        own = documents
        documents = kept("the documents of tokens", lambda: collectives.all_gather(own, ulysses, dim=1).wait())
    mask = mask.within(q.shape[_TOKENS] * ring.size)
    is_plain = mask in (CAUSAL, FULL) and documents is None and soft_cap is None and sinks is None
    if ring.size > 1 or not is_plain:
        if sinks is not None:
            sinks = sinks.chunk(ulysses.size)[ulysses.index]
        options: dict[str, Any] = dict(documents=documents, scale=scale, soft_cap=soft_cap, sinks=sinks, chunks=chunks)
        out = ring_attention(q, k, v, ring, mask=mask, **options)
    else:
        grouped = q.shape[_HEADS] != k.shape[_HEADS]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=mask == CAUSAL, scale=scale, enable_gqa=grouped)
    return conjugate(out, "all_to_all", "all_to_all", ulysses, dim=_HEADS, to_dim=_TOKENS)


def _to_heads(q: Tensor, k: Tensor, v: Tensor, group: AxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange s tokens of all heads for all U s tokens of the group, for 1 / U of the heads.

    Shape:
        q [batch, heads, s, head_dim] -> [batch, heads / U, U s, head_dim]; k and v the same with kv_heads. Tokens are
        concatenated in the order of the ranks. Backward exchanges the gradients the other way.
    """
    ranks = group.size
    if ranks == 1:
        return q, k, v
    heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
    for what, count in (("heads", heads), ("key/value heads", kv_heads)):
        if count % ranks:
            raise located_error(
                f"sequence parallelism by exchange of heads (ulysses): {count} {what} on each tensor rank do not "
                f"divide over {ranks} ranks, heads are split whole; mode='ring' sets no condition on heads"
            )
    if (q.numel() + k.numel() + v.numel()) * q.element_size() > _COALESCE_BYTES:  # a compiler knows no `nbytes`
        return _exchange(q, group), _exchange(k, group), _exchange(v, group)
    by_rank = [x.unflatten(_HEADS, (ranks, -1)) for x in (q, k, v)]
    coalesced = torch.cat(by_rank, dim=_HEADS + 1).flatten(_HEADS, _HEADS + 1)  # the heads of one rank side by side
    received = _exchange(coalesced, group)
    local_q, local_k, local_v = received.split([heads // ranks, kv_heads // ranks, kv_heads // ranks], dim=_HEADS)
    return local_q, local_k, local_v


def _exchange(x: Tensor, group: AxisGroup) -> Tensor:
    return conjugate(x, "all_to_all", "all_to_all", group, dim=_TOKENS, to_dim=_HEADS)
