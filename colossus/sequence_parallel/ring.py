"""Ring attention (2105.13120): keys and values go round a ring of ranks, which computes blockwise (2310.01889)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colossus.context.groups import AxisGroup
from colossus.sequence_parallel.kernels import block_backward, block_forward
from colossus.sequence_parallel.tiles import AttentionTile, ScoreBlock
from colossus.sequence_parallel.travel import Ring

#: groups by their c10d name: an operation that torch can record takes no other objects than tensors and numbers
_groups: weakref.WeakValueDictionary[str, AxisGroup] = weakref.WeakValueDictionary()


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: AxisGroup,
    *,
    causal: bool,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Exact attention over the tokens of all ranks of ``group``; no rank holds more than its own and one other's.

    Keys and values travel while the block before them is computed. In backward they travel again, and behind them the
    gradients of keys and values, to which every rank adds its part: at the end they are at their owner. Sent by a
    rank: forward 2 (R - 1) local blocks of kv_heads, backward 4 (R - 1).

    Shape:
        q [batch, heads, s, head_dim], k and v [batch, kv_heads, s, head_dim], the result like q: the s tokens that this
        rank holds, in the order of `order.local_indices` (without causal attention any order will do). The whole
        sequence has R s.

    Args:
        group: the R ranks. One rank is a ring too.
        documents: integers [batch, s]; a token looks only at tokens with the same number. Padding is a document
            of its own, say -1. It travels with the keys.
        scale: of the scores, by default head_dim ** -0.5.

    Raises:
        ValueError: when heads are no multiple of kv_heads, s is odd, or documents do not fit.
    """
    _check(q, k, v, documents, group)
    return _RingAttention.apply(q, k, v, documents, group, causal, q.shape[-1] ** -0.5 if scale is None else scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        group: AxisGroup,
        causal: bool,
        scale: float,
    ) -> Tensor:
        name = group.name if group.size > 1 else ""
        _groups[name] = group
        out, lse = RING_ATTENTION(q, k, v, documents, name, causal, scale)
        ctx.save_for_backward(q, k, v, documents, out, lse)
        ctx.options = group, causal, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(grads[0], *ctx.saved_tensors, *ctx.options), None, None, None, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, name: str, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp. One operation for torch: selective checkpointing can keep its results as a whole,
    and what happens inside, such as the merging in place, is not recorded."""
    ring = Ring(_groups[name], q.device)
    out = _wide_zeros(q)
    lse = torch.full_like(out[..., 0], float("-inf"))
    for source, (keys, values, *others) in ring.blocks(k, v, documents):
        pair = ScoreBlock(q.shape[-2], ring.size, ring.index, source, causal)
        for tile in pair.tiles(documents, *others):
            rows, columns = tile.queries, tile.keys
            part, part_lse = block_forward(
                q[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                causal=tile.causal,
                mask=tile.mask,
                scale=scale,
            )
            _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    group: AxisGroup,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Parts are added up in at least float32; what travels has the dtype of the keys."""
    ring = Ring(group, q.device)
    dq = _wide_zeros(q)

    def add_tile(tile: AttentionTile, keys: Tensor, values: Tensor, dk: Tensor, dv: Tensor) -> None:
        rows, columns = tile.queries, tile.keys
        parts = block_backward(
            dout[:, :, rows],
            q[:, :, rows],
            keys[:, :, columns],
            values[:, :, columns],
            out[:, :, rows],
            lse[:, :, rows],
            causal=tile.causal,
            mask=tile.mask,
            scale=scale,
        )
        for total, at, part in zip((dq, dk, dv), (rows, columns, columns), parts, strict=True):
            total[:, :, at] += part

    own: list[Tensor] = []
    arriving: Callable[[], list[Tensor]] | None = None
    for source, (keys, values, *others) in ring.blocks(k, v, documents):
        grads = [_wide_zeros(keys), _wide_zeros(values)]
        pair = ScoreBlock(q.shape[-2], ring.size, ring.index, source, causal)
        for tile in pair.tiles(documents, *others):
            add_tile(tile, keys, values, *grads)
        if source == ring.index:
            own = grads
            continue
        if arriving is not None:
            grads = _sums(grads, arriving())
        arriving = ring.exchange([x.to(k.dtype) for x in grads], "gradients of keys and values")
        del grads
    if arriving is not None:
        own = _sums(own, arriving())
    return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype)


def _sums(here: list[Tensor], there: list[Tensor]) -> list[Tensor]:
    return [mine.add_(theirs) for mine, theirs in zip(here, there, strict=True)]


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part, in place, to the output and log-sum-exp of the keys seen so far (the online softmax)."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _wide_zeros(x: Tensor) -> Tensor:
    """Zeros [batch, heads, tokens, head_dim], at least float32, that lie in memory as the kernels' results do."""
    batch, heads, tokens, head_dim = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(batch, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: AxisGroup) -> None:
    batch, heads, tokens, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2:] != (tokens, head_dim) or heads % k.shape[1]:
        raise ValueError(
            f"attention over a sequence: queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}; "
            f"they must be [batch, heads, tokens, head_dim] alike, but for fewer key and value heads that divide the "
            f"queries'"
        )
    if group.size > 1 and tokens % 2:
        raise ValueError(
            f"ring attention: {tokens} tokens on each rank, {group.size} ranks: a rank holds an early and a late chunk "
            f"of equal length, so the number must be even"
        )
    if documents is not None and (documents.shape != (batch, tokens) or documents.is_floating_point()):
        raise ValueError(
            f"attention over a sequence: documents {tuple(documents.shape)} of {documents.dtype} must be whole numbers "
            f"[batch, tokens] = [{batch}, {tokens}], the number of the document that each token of this rank belongs to"
        )


# torch.library.custom_op would do the same, but imports torch._dynamo (4 s) at its first call
_library = torch.library.Library("colossus", "FRAGMENT")
_library.define(
    "ring_attention"
    "(Tensor q, Tensor k, Tensor v, Tensor? documents, str group, bool causal, float scale) -> (Tensor, Tensor)"
)
_library.impl("ring_attention", _forward, "CompositeExplicitAutograd")
#: the forward pass as torch sees it, for a policy of selective checkpointing
RING_ATTENTION = torch.ops.colossus.ring_attention.default
