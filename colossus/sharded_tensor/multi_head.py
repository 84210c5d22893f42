"""The forward of torch.nn.MultiheadAttention for split tensors, from functions that have rules."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from colossus.error_place import located_error
from colossus.sharded_tensor.placement import MixesPartsError
from colossus.sharded_tensor.rules import refusal


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``torch.nn.functional.multi_head_attention_forward``, which calls this for split tensors.

    Returns:
        The output, and the attention weights; None in their place without ``need_weights``.

    Shape:
        query and output [tokens, batch, features], key and value [keys, batch, ..]; weights [batch, tokens, keys], or
        [batch, heads, tokens, keys] where they are not averaged.

    Raises:
        ValueError: the input has no batch dim, or there are added or static keys.
    """
    if query.dim() != 3 or any(x is not None for x in (bias_k, bias_v, static_k, static_v)) or add_zero_attn:
        problem = MixesPartsError("without a batch, with add_bias_kv, add_zero_attn or static keys is not followed")
        raise located_error(refusal("multi_head_attention_forward", problem, query))
    if use_separate_proj_weight:
        weights: Any = q_proj_weight, k_proj_weight, v_proj_weight
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(attn_mask, key_padding_mask, q, num_heads)
    rate = dropout_p if training else 0.0
    if need_weights:
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        attention = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        mixed: Tensor = attention @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal=causal)
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights:
        return out, None
    return out, attention.mean(1) if average_attn_weights else attention


def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, num_heads: int) -> Tensor | None:
    """Return the sum of both masks as addends of the scores, of a shape that is broadcast to them; None without any.

    Shape:
        [tokens, keys], [batch, heads, tokens, keys] or [batch, 1, 1, keys].
    """
    mask = None if attn_mask is None else _as_addend(attn_mask, q)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if padding is None:
        return mask
    key_mask = _as_addend(padding, q)[:, None, None]
    return key_mask if mask is None else mask + key_mask


def _as_addend(mask: Tensor, q: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask.to(q.dtype)
    return mask.to(q.dtype).masked_fill(mask, float("-inf"))
