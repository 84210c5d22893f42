"""Attention by its matrix of weights, for what torch's kernels have no option for: masks as tensors, and dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colossus.sequence_parallel.kernels import soft_capped


def attend_by_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    drop: Callable[[Tensor], Tensor] | None,
    *,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention whose weights [batch, heads, tokens, tokens] are kept for backward.

    Args:
        query, key, value: [batch, heads, tokens, head_dim], with fewer heads of keys and values or as many.
        mask: bool, True where a query may attend, or what is added to the scores.
        drop: drops weights as `Dropout` does; torch's kernel would draw its own mask.
        scale, soft_cap, sinks: see `colossus.sequence_parallel.ring_attention`.
    """
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if soft_cap is not None:
        scores = soft_capped(scores, soft_cap)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = torch.ops.aten._safe_softmax(scores, -1)  # 0 for a query that may attend to nothing
    weights = weights[..., : key.shape[-2]]
    return (weights if drop is None else drop(weights)) @ value


def same_document(documents: Tensor) -> Tensor:
    """Return [batch, 1, tokens, tokens], True where query and key share a document."""
    return (documents[:, :, None] == documents[:, None, :])[:, None]


def both(sees: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask that is True, or what another mask adds to the scores, where ``sees`` is True."""
    if mask is None:
        return sees
    return sees & mask if mask.dtype == torch.bool else mask.masked_fill(~sees, float("-inf"))
