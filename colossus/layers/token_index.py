"""Indexing of tensors that hold tokens: right along other dims, and of rows of a table by ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.layers.token_dim import ATTENTION, MixedTokensError, TokenDim, aligned, found, tokens_of

_REMEDY = f"{ATTENTION}. A loss function may weigh or leave out tokens, each by itself (torch.where)"


def indexed(x: Tensor, index: Any) -> TokenDim:
    """The token dim of ``x[index]``.

    Raises:
        MixedTokensError: for an index that takes some of the tokens, or one that is not understood.
    """
    if tokens_of(x) is None:
        if isinstance(index, Tensor) and not index.dtype.is_floating_point and index.dtype != torch.bool:
            return found(index)  # rows of a table
        raise MixedTokensError("indexes a plain tensor, which is whole, by tokens, of which a rank has a part")
    tokens, parts = found(x), index if isinstance(index, tuple) else (index,)
    dim = out = 0
    answer = None
    arrays = 0
    for part in _without_ellipsis(parts, x.dim()):
        if part is None:
            out += 1
            continue
        if isinstance(part, bool) or (isinstance(part, Tensor) and (part.dtype == torch.bool or tokens_of(part))):
            raise MixedTokensError("selects by a mask or by indices of the tokens", _REMEDY)
        if dim == tokens.dim:
            if not isinstance(part, slice) or part.indices(x.shape[dim]) != (0, x.shape[dim], 1):
                raise MixedTokensError(f"selects from dim {dim}, which holds the tokens", _REMEDY)
            answer = tokens.at(out)
        dim += 1
        if isinstance(part, slice):
            out += 1
        elif isinstance(part, (Tensor, list, range)):
            out += part.dim() if isinstance(part, Tensor) else torch.as_tensor(part).dim()
            arrays += 1
    if answer is None or arrays > 1:
        raise MixedTokensError("has an index that is not understood", "Index one dim at a time")
    return answer


def _without_ellipsis(parts: tuple[Any, ...], ndim: int) -> list[Any]:
    used = sum(part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else part is not None
               for part in parts if part is not Ellipsis)  # fmt: skip
    rest = [slice(None)] * (ndim - used)
    for place, part in enumerate(parts):
        if part is Ellipsis:
            return [*parts[:place], *rest, *parts[place + 1 :]]
    return [*parts, *rest]


def assigned(x: Tensor, index: Any, value: Any) -> TokenDim:
    """The token dim of x after ``x[index] = value``."""
    if tokens_of(x) is None:
        raise MixedTokensError("writes tokens, of which a rank has a part, into a plain tensor, which is whole")
    tokens = found(x)
    if isinstance(index, Tensor) and index.dtype == torch.bool and tokens_of(index) == tokens:
        if isinstance(value, Tensor) and value.dim():
            raise MixedTokensError("writes to tokens that a mask selects", "torch.where(mask, value, x)")
        return tokens
    at = indexed(x, index)
    if isinstance(value, Tensor):
        with torch.no_grad():
            region = x.detach()[index]
        _require_fit(region, at, value)
    return tokens


def _require_fit(region: Tensor, at: TokenDim, value: Tensor) -> None:
    """That a value is right for each token of the part of x that it is written to."""
    right = at.dim - region.dim()
    where = tokens_of(value)
    if where is None:
        if value.dim() >= -right and value.shape[right] != 1:
            raise MixedTokensError(f"writes a plain tensor of shape {tuple(value.shape)}, which is whole, to tokens")
    elif where.at(where.dim - value.dim()) != at.at(right):
        aligned((region, value))
        raise MixedTokensError(f"writes tokens in dim {where.dim} to tokens in dim {at.dim}")
