"""Ring attention (2105.13120): keys and values are passed round a ring of ranks, blockwise as in 2310.01889."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from colossus.comm.autograd import first_order
from colossus.comm.links import rotate
from colossus.context.groups import AxisGroup, group_of
from colossus.error_place import located_error
from colossus.sequence_parallel.kernels import block_backward, block_forward
from colossus.sequence_parallel.mask import Mask
from colossus.sequence_parallel.tiles import TILE, AttentionTile, RingTokens, attention_tiles, needed_steps


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: AxisGroup,
    *,
    mask: Mask,
    documents: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunks: int = 2,
) -> Tensor:
    """Exact attention over the tokens of all ranks of ``group``.

    A rank holds its own keys and values, those of the rank it works on, and those of the next, which are on their way:
    never the whole sequence. Sent by a rank: forward 2 (R - 1) blocks of [batch, kv_heads, s, head_dim], backward
    4 (R - 1); a mask may let R - 1 fall to the number of other ranks that are met (`needed_steps`), 2 under a window of
    up to s / 2 tokens to the left.

    Shape:
        q [batch, heads, s, head_dim], k and v [batch, kv_heads, s, head_dim], the result like q: the s tokens that this
        rank holds, in zigzag order (under a full mask any order will do). The whole sequence has R s.

    Args:
        group: the R ranks. One rank is a ring too.
        mask: what a token attends to, by positions in the sequence.
        documents: integers [batch, s]; a token attends only to tokens with the same number. Padding is a document
            of its own, say -1. They are passed on with the keys.
        scale: of the scores, by default head_dim ** -0.5.
        soft_cap: the bound of the scores, if any, see `block_forward`.
        sinks: [heads], a score of each head beside those of the keys, whose value is zero (2309.17453; gpt-oss).
        chunks: of each rank, see `colossus.sequence_parallel.modes`.

    Raises:
        ValueError: when heads are no multiple of kv_heads, s is odd, or documents do not fit.
    """
    _check(q, k, v, documents, group, chunks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(q, k, v, documents, sinks, group.key, mask.sizes, scale, soft_cap, chunks)


class _RingAttention(torch.autograd.Function):
    """The autograd function of ring attention.

    On each of R ranks, with K and V the keys and values of all ranks, concatenated:

        forward     out = softmax(scale q K^T) V             k, v: all-gather, a block at a time
        backward    dq = sum of the blocks' shares           stays where q is
                    dk, dv = sum of the ranks' shares        dk, dv: reduce-scatter, the dual of the all-gather

    Neither collective is called as such. In step t = 0 .. R - 1 rank i works on the keys and values of rank i - t,
    while they go on to rank i + 1. In backward they are passed on in the same direction again, and the sums of their
    gradients one step behind them: rank i adds its share of the dk and dv of rank i - t to what rank i - 1 has sent,
    and sends the sum to rank i + 1. The last of these messages comes to the owner, who adds its own share of step 0.
    Steps that a mask leaves without work are left out: messages then go on by several ranks.

    Per rank:
        q, out, dout, dq    [batch, heads, s, head_dim]
        k, v, dk, dv        [batch, kv_heads, s, head_dim]; the same of the block at work and of the one on its way
        documents           [batch, s], passed on with k and v
        lse                 [batch, heads, s], log-sum-exp of each query's scores with all keys and the sink
        saved               q, k, v, documents, sinks, out, lse

    The sum of each query's softmax begins with its sink, once, before the first block of keys. In backward the blocks
    need nothing of it but lse; its own gradient is that of a score whose value is zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        sinks: Tensor | None,
        *options: Any,
    ) -> Tensor:
        out, lse = RING_ATTENTION(q, k, v, documents, sinks, *options)
        ctx.save_for_backward(q, k, v, documents, sinks, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # what records operations sees those of a backward; a compiler can trace no messages
        backward = torch.ops.colossus.ring_attention_backward if torch.compiler.is_compiling() else _backward
        q, k, v, documents, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = backward(grads[0], q, k, v, documents, out, lse, *ctx.options)
        dsinks = None
        if sinks is not None:
            weights = (sinks[:, None] - lse).exp()
            dsinks = -(weights * (grads[0] * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, None, dsinks, *[None] * 5


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    group_key: str,
    mask: Sequence[int],
    scale: float,
    soft_cap: float | None,
    chunks: int,
) -> tuple[Tensor, Tensor]:
    """Return the output [batch, heads, s, head_dim] and its log-sum-exp [batch, heads, s]; see `_RingAttention`.

    One operation for torch: selective checkpointing can keep its results as a whole, and what happens inside, such as
    the merging in place, is not recorded.
    """
    group = group_of(group_key)
    out = _wide_zeros(q)
    lse = torch.full_like(out[..., 0], float("-inf"))
    if sinks is not None:
        lse.copy_(sinks[:, None])
    tokens = RingTokens(q.shape[-2], group.size, chunks)
    steps, largest = needed_steps(Mask(*mask), tokens), None if soft_cap is None else TILE
    for source, (keys, values, *key_documents) in _rotating_blocks(k, v, documents, group, steps):
        block = Mask(*mask), tokens, group.index, source, documents
        for tile in attention_tiles(*block, *key_documents, largest=largest, device=q.device):
            rows, columns = tile.queries, tile.keys
            tile_out, tile_lse = block_forward(
                q[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                causal=tile.causal,
                mask=tile.mask,
                scale=scale,
                soft_cap=soft_cap,
            )
            _merge(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    group_key: str,
    mask: Sequence[int],
    scale: float,
    soft_cap: float | None,
    chunks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v; see `_RingAttention`.

    Sums are kept in at least float32; messages have the dtype of the keys.
    """
    group = group_of(group_key)
    dq = _wide_zeros(q)

    def add_tile(tile: AttentionTile, keys: Tensor, values: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients of a tile; its intermediates are freed before the next one."""
        rows, columns = tile.queries, tile.keys
        grads = block_backward(
            dout[:, :, rows],
            q[:, :, rows],
            keys[:, :, columns],
            values[:, :, columns],
            out[:, :, rows],
            lse[:, :, rows],
            causal=tile.causal,
            mask=tile.mask,
            scale=scale,
            soft_cap=soft_cap,
        )
        for total, span, grad in zip((dq, dk, dv), (rows, columns, columns), grads, strict=True):
            total[:, :, span] += grad

    own_grads: list[Tensor] = []
    arriving: Callable[[], list[Tensor]] | None = None
    tokens = RingTokens(q.shape[-2], group.size, chunks)
    steps, largest = needed_steps(Mask(*mask), tokens), None if soft_cap is None else TILE
    hops = [following - step for step, following in pairwise([*steps, group.size])]
    blocks = _rotating_blocks(k, v, documents, group, steps)
    for (source, (keys, values, *key_documents)), hop in zip(blocks, hops, strict=True):
        grads = [_wide_zeros(keys), _wide_zeros(values)]
        block = Mask(*mask), tokens, group.index, source, documents
        for tile in attention_tiles(*block, *key_documents, largest=largest, device=q.device):
            add_tile(tile, keys, values, *grads)
        if source == group.index:
            own_grads = grads
            continue
        if arriving is not None:
            grads = _add(grads, arriving())
        arriving = rotate([grad.to(k.dtype) for grad in grads], group, "gradients of keys and values", hop)
        del grads
    if arriving is not None:
        own_grads = _add(own_grads, arriving())
    return dq.to(q.dtype), own_grads[0].to(k.dtype), own_grads[1].to(v.dtype)


def _rotating_blocks(
    k: Tensor, v: Tensor, documents: Tensor | None, group: AxisGroup, steps: tuple[int, ...]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield keys, values (and documents) of ranks, beginning with this one, and the index of the rank they belong to.

    The next block is on its way while the caller works with this one.

    Args:
        k, v, documents: those of this rank.
        group: the ranks.
        steps: how far before this rank the others are, see `needed_steps`.
    """
    block = [k, v] if documents is None else [k, v, documents]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        arriving = None if following is None else rotate(block, group, "keys and values", following - step)
        yield (group.index - step) % group.size, block
        if arriving is not None:
            block = arriving()


def _add(totals: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [total.add_(other) for total, other in zip(totals, others, strict=True)]


def _merge(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Add the output of more keys, in place, to the output and log-sum-exp of the keys seen so far (online softmax)."""
    total = torch.logaddexp(lse, tile_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(tile_out, (tile_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _wide_zeros(x: Tensor) -> Tensor:
    """Zeros [batch, heads, tokens, head_dim], at least float32, that lie in memory as the kernels' results do."""
    batch, heads, tokens, head_dim = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(batch, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: AxisGroup, chunks: int) -> None:
    batch, heads, tokens, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2:] != (tokens, head_dim) or heads % k.shape[1]:
        raise located_error(
            f"attention over a sequence: queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)} must "
            f"be [batch, heads, tokens, head_dim] alike, but for fewer key and value heads that divide the queries'"
        )
    if group.size > 1 and tokens % chunks:
        raise located_error(
            f"ring attention: a rank holds {chunks} chunks of equal length, not {tokens} tokens: the number must be a "
            f"multiple of {chunks}"
        )
    if documents is not None and (documents.shape != (batch, tokens) or documents.is_floating_point()):
        raise located_error(
            f"attention over a sequence: documents {tuple(documents.shape)} of {documents.dtype} must be whole numbers "
            f"[batch, tokens] = [{batch}, {tokens}]"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of `_forward`, for a trace without values."""
    out = _wide_zeros(q)
    return out.to(q.dtype), torch.full_like(out[..., 0], 0)


def _shapes_of_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return tensors of the shapes of `_backward`, for a trace without values."""
    return tuple(_wide_zeros(x).to(x.dtype) for x in (q, k, v))


# torch.library.custom_op would do the same, but imports torch._dynamo (4 s) at its first call
_library = torch.library.Library("colossus", "FRAGMENT")
_arguments = "Tensor q, Tensor k, Tensor v, Tensor? documents"
_options = "str group_key, int[] mask, float scale, float? soft_cap, int chunks"
_library.define(f"ring_attention({_arguments}, Tensor? sinks, {_options}) -> (Tensor, Tensor)")
_saved = f"{_arguments}, Tensor out, Tensor lse"
_library.define(f"ring_attention_backward(Tensor dout, {_saved}, {_options}) -> (Tensor, Tensor, Tensor)")
for _name, _real, _fake in (
    ("ring_attention", _forward, _shapes),
    ("ring_attention_backward", _backward, _shapes_of_gradients),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    _library.impl(_name, _fake, "Meta")
#: the forward pass as torch sees it, for a policy of selective checkpointing
RING_ATTENTION = torch.ops.colossus.ring_attention.default
