"""Attention of a block of queries to a block of keys: in which tiles, and on torch's own flash kernels.

A block of scores is what the queries of one ring rank make with the keys of another; both ranks hold a head and a tail
chunk (see `colossus.sequence_parallel.modes`). Under a causal mask there are three kinds of blocks, each of one kernel
call and of the same work: keys of the same rank (causal as they lie, for the head comes before the tail), keys of an
earlier rank (all queries see its head, none its tail), keys of a later one (the tail sees all, the head nothing).

Documents and windows are cut finer, so that no mask is larger than a tile. Tiles outside of a window are left out; on
CPU, where the host can read documents at no cost, so are tiles that they mask out.

`block_forward` also returns the log-sum-exp of every query's scores, with which the outputs of several blocks of keys
are merged into one softmax. `block_backward` is exact for one block when it is given the merged output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
#: the memory-efficient CUDA kernel pads the log-sum-exp to a multiple of this, and wants masks in rows of 16
_LSE_ALIGNMENT, _MASK_ALIGNMENT = 32, 16
#: tokens of a tile: large enough that a kernel call costs little beside its work
TILE = 512
#: where documents are not read nothing is skipped for being small: fewer calls, masks of at most 4 MB a sample
MASKED_TILE = 2048


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """One kernel call.

    Attributes:
        queries: rows of the local queries.
        keys: rows of the keys of the block.
        causal: whether query i of the tile sees the keys up to i only; then there is no mask.
        mask: [batch or 1, 1, queries, keys], True where a query may look, or None.
    """

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


def attention_tiles(
    num_tokens: int,
    ring: int,
    query_rank: int,
    key_rank: int,
    causal: bool,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    *,
    window: int | None = None,
    device: torch.device | None = None,
) -> Iterator[AttentionTile]:
    """Yield the tiles of one block that are computed.

    Every query sees itself, in a tile of the block of its own rank's keys.

    Args:
        num_tokens: queries, and keys, of the block: the tokens of one rank.
        ring: number of ring ranks.
        query_rank, key_rank: their indices in the ring.
        documents: [batch, num_tokens], numbers of the queries' documents; a query sees keys of the same number only.
        key_documents: the same of the keys.
        window: a query sees itself and the ``window - 1`` tokens before it; only where ``causal``.
        device: device of the masks at the edge of a window.
    """
    is_read = documents is None or can_be_read(documents)
    if documents is None or key_documents is None or (is_read and _is_one_document(documents, key_documents)):
        documents = key_documents = None
        if window is None:
            yield from _tiles_of_one_document(num_tokens, query_rank, key_rank, causal)
            return
    size = TILE if is_read else MASKED_TILE
    pairs = product(_ranges(num_tokens, ring, query_rank, size), _ranges(num_tokens, ring, key_rank, size))
    for (queries, query_start), (keys, key_start) in pairs:
        offset = query_start - key_start
        if causal and offset < 0:
            continue
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        if window is not None and offset - num_keys + 1 >= window:
            continue
        mask = None
        if documents is not None and key_documents is not None:
            mask = documents[:, None, queries, None] == key_documents[:, None, None, keys]
            if is_read and not mask.any():
                continue
            if is_read and mask.all():
                mask = None
        if window is not None and offset + num_queries > window:
            near = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
            near = near.tril_(offset).triu_(offset - window + 1)
            mask = near if mask is None else mask & near
        elif mask is not None and causal and offset == 0:
            mask = mask.tril()
        yield AttentionTile(queries, keys, causal and offset == 0 and mask is None, mask)


def needed_steps(num_tokens: int, ring: int, window: int | None) -> list[int]:
    """Return how far before a rank in the ring those are whose keys any rank needs: 0 for its own, and rising.

    Args:
        num_tokens: tokens of one rank, half of them in its early chunk.
        ring: number of ring ranks.
        window: see `attention_tiles`.
    """
    if window is None or ring == 1:
        return list(range(ring))
    reach = -(-(window - 1) // (num_tokens // 2))
    rank_of = [min(chunk, 2 * ring - 1 - chunk) for chunk in range(2 * ring)]
    return sorted(
        {
            (rank_of[chunk] - rank_of[before]) % ring
            for chunk in range(2 * ring)
            for before in range(max(0, chunk - reach), chunk + 1)
        }
    )


def _tiles_of_one_document(num_tokens: int, query_rank: int, key_rank: int, causal: bool) -> Iterator[AttentionTile]:
    everything, half = slice(0, num_tokens), num_tokens // 2
    if not causal or query_rank == key_rank:
        yield AttentionTile(everything, everything, causal)
    elif key_rank < query_rank:
        yield AttentionTile(everything, slice(0, half))
    else:
        yield AttentionTile(slice(half, num_tokens), everything)


def _ranges(num_tokens: int, ring: int, rank: int, size: int) -> list[tuple[slice, int]]:
    """Return a rank's tokens in ranges of at most ``size``: (rows, position of the first in the sequence)."""
    chunk, chunks = (num_tokens // 2, (rank, 2 * ring - 1 - rank)) if ring > 1 else (num_tokens, (0,))
    return [
        (slice(place * chunk + start, place * chunk + min(start + size, chunk)), number * chunk + start)
        for place, number in enumerate(chunks)
        for start in range(0, chunk, size)
    ]


def can_be_read(documents: Tensor) -> bool:
    """Return whether the host can read these numbers without waiting for a device."""
    return documents.device.type == "cpu"


def _is_one_document(documents: Tensor, key_documents: Tensor) -> bool:
    """Return whether in every sample all these tokens belong to one document."""
    first = documents[:, :1]
    return torch.equal(documents, first.expand_as(documents)) and torch.equal(key_documents, first.expand_as(documents))


# -- kernels ----------------------------------------------------------------------------------------------------


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to these keys only.

    The CUDA branches follow the kernels' signatures in torch 2.13 but have not been run on a device.

    Args:
        q: [batch, heads, s, head_dim].
        k, v: [batch, kv_heads, t, head_dim]; heads is a multiple of kv_heads (2305.13245).
        causal: query i sees the keys up to i; s = t, and there is no mask.
        mask: bool [batch or 1, 1, s, t], True where a query may look. A query that may look nowhere gets a finite output
            and a log-sum-exp so low that it weighs nothing beside any real one.
        scale: of the scores.

    Returns:
        out [batch, heads, s, head_dim] in the dtype of q, and its log-sum-exp [batch, heads, s], at least float32.
    """
    q, k, v = _with_dense_rows(q, k, v)
    kernel = _kernel(q, mask)
    if kernel == "cpu":
        bias = _bias(mask, q.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse
    if kernel == "flash":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    k, v = _repeat_key_heads(k, q), _repeat_key_heads(v, q)
    if kernel == "plain":
        return _plain_forward(q, k, v, causal, mask, scale)
    bias = _aligned_bias(mask, q)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[-2]]


def block_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of dq that comes from these keys, and of dk and dv that comes from these queries.

    Args:
        dout, out, lse: of the attention of these queries to *all* their keys, shapes as `block_forward` returns them.
        q, k, v, causal, mask, scale: as in `block_forward`.

    Returns:
        dq, dk, dv in the shapes of q, k, v; dk and dv are summed over the query heads that share a key head.
    """
    dout, q, k, v, out = _with_dense_rows(dout, q, k, v, out)
    kernel = _kernel(q, mask)
    if kernel == "cpu":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(mask, q.dtype), scale=scale)
        return dq, dk, dv
    if kernel == "flash":
        backward, unused = _aten._scaled_dot_product_flash_attention_backward, q.new_empty(2, dtype=torch.uint64)
        lengths = None, None, q.shape[-2], k.shape[-2]
        lse = lse.contiguous()
        dq, dk, dv = backward(dout, q, k, v, out, lse, *lengths, 0.0, causal, unused, unused, scale=scale)
        return dq, dk, dv
    kv_heads, k, v = k.shape[1], _repeat_key_heads(k, q), _repeat_key_heads(v, q)
    if kernel == "plain":
        dq, dk, dv = _plain_backward(dout, q, k, v, out, lse, causal, mask, scale)
    else:
        backward, unused = _aten._scaled_dot_product_efficient_attention_backward, q.new_empty((), dtype=torch.int64)
        lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ALIGNMENT), value=float("inf")).contiguous()
        needs_gradient, bias = [True, True, True, False], _aligned_bias(mask, q)
        dq, dk, dv, _ = backward(
            dout, q, k, v, bias, out, lse, unused, unused, 0.0, needs_gradient, causal, scale=scale
        )
    return dq, _sum_of_query_heads(dk, kv_heads), _sum_of_query_heads(dv, kv_heads)


def _kernel(q: Tensor, mask: Tensor | None) -> str:
    """Return the name of the fastest kernel for this device, dtype, head size and mask."""
    head_dim = q.shape[-1]
    if q.device.type == "cpu" and q.is_floating_point():
        return "cpu"
    if q.device.type == "cuda" and q.dtype in _HALF and mask is None and head_dim % 8 == 0 and head_dim <= 256:
        return "flash"
    if q.device.type == "cuda" and q.dtype in (*_HALF, torch.float32) and head_dim % (16 // q.element_size()) == 0:
        return "efficient"
    return "plain"


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, mask, scale)
    lse = scores.logsumexp(dim=-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)).to(q.dtype), lse


def _plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, causal, mask, scale) - lse.unsqueeze(-1)).exp()
    wide_dout, wide_q, wide_k, wide_v = (x.to(weights.dtype) for x in (dout, q, k, v))
    mean = (wide_dout * out).sum(-1, keepdim=True)
    dscores = weights * (wide_dout @ wide_v.mT - mean) * scale
    dq, dk, dv = dscores @ wide_k, dscores.mT @ wide_q, weights.mT @ wide_dout
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if causal:
        mask = torch.ones_like(scores, dtype=torch.bool).tril_()
    return scores if mask is None else scores.masked_fill(~mask, _masked_score(wide))


def _masked_score(dtype: torch.dtype) -> float:
    """Return the score of a masked key: finite, so that a query without any key gives no NaN."""
    return torch.finfo(dtype).min / 4


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores: 0 for a key that is seen, `_masked_score` for others."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, _masked_score(dtype))


def _aligned_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    length = mask.shape[-1]
    bias = _bias(F.pad(mask, (0, -length % _MASK_ALIGNMENT)), q.dtype)
    assert bias is not None
    return bias[..., :length].expand(q.shape[0], q.shape[1], -1, -1)


def _with_dense_rows(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose heads are contiguous in memory, as the kernels read them."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _repeat_key_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key heads until there is one for every query head."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_of_query_heads(x: Tensor, kv_heads: int) -> Tensor:
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)
