"""Attention of a block of queries to a block of keys on torch's own flash kernels.

`block_forward` also returns the log-sum-exp of every query's scores, with which the outputs of several blocks of keys
are merged into one softmax. `block_backward` is exact for one block when it is given the merged output and log-sum-exp.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
#: the memory-efficient CUDA kernel pads the log-sum-exp to a multiple of this, and wants masks in rows of 16
_LSE_ALIGNMENT, _MASK_ALIGNMENT = 32, 16


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to these keys only.

    The CUDA branches follow the kernels' signatures in torch 2.13 but have not been run on a device.

    Args:
        q: [batch, heads, s, head_dim].
        k, v: [batch, kv_heads, t, head_dim]; heads is a multiple of kv_heads (2305.13245).
        causal: query i sees the keys up to i; s = t, and there is no mask.
        mask: bool [batch or 1, 1, s, t], True where a query may look. A query that may look nowhere gets a finite
            output and a log-sum-exp so low that it weighs nothing beside any real one.
        scale: of the scores.
        soft_cap: the bound of the scores, soft_cap * tanh(score / soft_cap) (2408.00118, Gemma 2), if any. torch has no
            kernel with it, so all scores of this call are stored.

    Returns:
        out [batch, heads, s, head_dim] in the dtype of q, and its log-sum-exp [batch, heads, s], at least float32.
    """
    q, k, v = _with_dense_rows(q, k, v)
    kernel = _kernel(q, mask) if soft_cap is None else "plain"
    if kernel == "cpu":
        bias = _bias(mask, q.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse
    if kernel == "flash":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    k, v = _repeat_key_heads(k, q), _repeat_key_heads(v, q)
    if kernel == "plain":
        return _plain_forward(q, k, v, causal, mask, scale, soft_cap)
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
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of dq that comes from these keys, and of dk and dv that comes from these queries.

    Args:
        dout, out, lse: of the attention of these queries to *all* their keys, shapes as `block_forward` returns them.
        q, k, v, causal, mask, scale, soft_cap: as in `block_forward`.

    Returns:
        dq, dk, dv in the shapes of q, k, v; dk and dv are summed over the query heads that share a key head.
    """
    dout, q, k, v, out = _with_dense_rows(dout, q, k, v, out)
    kernel = _kernel(q, mask) if soft_cap is None else "plain"
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
        dq, dk, dv = _plain_backward(dout, q, k, v, out, lse, causal, mask, scale, soft_cap)
    else:
        backward, unused = _aten._scaled_dot_product_efficient_attention_backward, q.new_empty((), dtype=torch.int64)
        lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ALIGNMENT), value=float("inf")).contiguous()
        needs_gradient, bias = [True, True, True, False], _aligned_bias(mask, q)
        dq, dk, dv, _ = backward(
            dout, q, k, v, bias, out, lse, unused, unused, 0.0, needs_gradient, causal, scale=scale
        )
    return dq, _sum_of_query_heads(dk, kv_heads), _sum_of_query_heads(dv, kv_heads)


def attend_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention to these keys and no others, in inference.

    Args:
        q, k, v, causal, mask, soft_cap: as in `block_forward`.
        scale: of the scores, by default head_dim ** -0.5.
        sinks: scores beside those of the keys, whose value is zero; broadcastable to [batch, heads, s].
    """
    if soft_cap is None and sinks is None:
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=is_grouped)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = block_forward(q, k, v, causal=causal, mask=mask, scale=scale, soft_cap=soft_cap)
    return out if sinks is None else out * (lse - sinks).sigmoid().unsqueeze(-1).to(out.dtype)


def _kernel(q: Tensor, mask: Tensor | None) -> str:
    """Return the name of the fastest kernel for this device, dtype, head size and mask."""
    head_dim = q.shape[-1]
    if q.device.type == "cpu" and q.is_floating_point():
        return "cpu"
    fits_flash = q.dtype in _HALF and mask is None and head_dim % 8 == 0 and head_dim <= 256
    if q.device.type == "cuda" and fits_flash and _has_flash(q.device):
        return "flash"
    if q.device.type == "cuda" and q.dtype in (*_HALF, torch.float32) and head_dim % (16 // q.element_size()) == 0:
        return "efficient"
    return "plain"


@lru_cache
def _has_flash(device: torch.device) -> bool:
    """Return whether torch's flash kernels run on a CUDA device: since Ampere. One that is not here has them."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    scores = _masked(_scores(q, k, scale, soft_cap), causal, mask)
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
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, scale, soft_cap)
    weights = (_masked(scores, causal, mask) - lse.unsqueeze(-1)).exp()
    wide_dout, wide_q, wide_k, wide_v = (x.to(weights.dtype) for x in (dout, q, k, v))
    mean = (wide_dout * out).sum(-1, keepdim=True)
    dscores = weights * (wide_dout @ wide_v.mT - mean) * scale
    if soft_cap is not None:
        dscores *= 1 - (scores / soft_cap).square()
    dq, dk, dv = dscores @ wide_k, dscores.mT @ wide_q, weights.mT @ wide_dout
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    return scores if soft_cap is None else soft_capped(scores, soft_cap)


def soft_capped(x: Tensor, bound: float) -> Tensor:
    """Return bound * tanh(x / bound)."""
    return (x / bound).tanh() * bound


def _masked(scores: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    if causal:
        mask = torch.ones_like(scores, dtype=torch.bool).tril_()
    return scores if mask is None else scores.masked_fill(~mask, _masked_score(scores.dtype))


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
