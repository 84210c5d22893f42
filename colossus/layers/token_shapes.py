"""Views, permutations and repetitions of tensors that hold tokens: where the tokens are then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.layers.token_dim import (
    MixedTokensError,
    TokenDim,
    avoid,
    found,
    regrouped,
    several,
    tokens_of,
    without,
)


def _repeated(x: Tensor, *counts: Any, **options: Any) -> TokenDim:
    sizes = _sizes(*counts, **options)
    tokens = found(x)
    right = tokens.at(tokens.dim - x.dim())
    if sizes[right.dim :][:1] != (1,) and len(sizes) >= -right.dim:
        raise MixedTokensError("repeats the tokens")
    return right


def _expanded(x: Tensor, *counts: Any, **options: Any) -> TokenDim:
    sizes = counts[0].shape if counts and isinstance(counts[0], Tensor) else _sizes(*counts, **options)
    tokens = found(x)
    right = tokens.at(tokens.dim - x.dim())
    if sizes[right.dim] not in (-1, x.shape[tokens.dim]):
        raise MixedTokensError("repeats the tokens")
    return right


def _sizes(*sizes: Any, **options: Any) -> tuple[int, ...]:
    given = next((options[name] for name in ("size", "repeats", "dims") if name in options), sizes)
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return tuple(given)


def _repeat_interleaved(x: Tensor, repeats: Any, dim: int | None = None, **options: Any) -> TokenDim:
    if isinstance(repeats, Tensor) and tokens_of(repeats) is not None:
        raise MixedTokensError("repeats by counts that every token has its own of")
    return avoid(x, dim, "repeats along")


def _permuted(order_of: Callable[..., Sequence[int]]) -> Callable[..., TokenDim]:
    def rule(x: Tensor, *args: Any, **kwargs: Any) -> TokenDim:
        ndim, tokens = x.dim(), found(x)
        order = [dim % ndim for dim in order_of(ndim, *args, **kwargs)]
        return tokens.at(order.index(tokens.dim))

    return rule


def _swapped(ndim: int, dim0: int = -1, dim1: int = -2, **names: int) -> list[int]:
    order = list(range(ndim))
    a, b = names.get("axis0", dim0), names.get("axis1", dim1)
    order[a], order[b] = order[b], order[a]
    return order


def _as_complex(x: Tensor) -> TokenDim:
    return avoid(x, -1, "pairs the elements of")


def given_dims(ndim: int, *dims: Any, **names: Any) -> Sequence[int]:
    dims = names.get("dims", dims)
    return dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims


def _moved(ndim: int, source: Any, destination: Any) -> list[int]:
    sources, targets = ([dim % ndim for dim in several(each) or ()] for each in (source, destination))
    order = [-1] * ndim
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    rest = iter([dim for dim in range(ndim) if dim not in sources])
    return [next(rest) if dim < 0 else dim for dim in order]


def _unsqueezed(x: Tensor, dim: int) -> TokenDim:
    tokens = found(x)
    return tokens.at(tokens.dim + (dim % (x.dim() + 1) <= tokens.dim))


def _squeezed(x: Tensor, dim: Any = None) -> TokenDim:
    tokens = found(x)
    dims = range(x.dim()) if dim is None else [each % x.dim() for each in several(dim) or ()]
    if x.shape[tokens.dim] == 1 and tokens.dim in dims:
        raise MixedTokensError("removes the dim of the tokens, of which this rank has one", "Name the other dims")
    return without(tokens, [each for each in dims if x.shape[each] == 1 and each != tokens.dim], x.dim())


def _flattened(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> TokenDim:
    tokens, ndim = found(x), x.dim()
    start, end = start_dim % ndim, end_dim % ndim
    if not start <= tokens.dim <= end:
        return tokens if tokens.dim < start else tokens.at(tokens.dim - (end - start))
    before, after = math.prod(x.shape[start : tokens.dim]), math.prod(x.shape[tokens.dim + 1 : end + 1])
    return TokenDim(start, tokens.before * before, tokens.after * after)


def _unflattened(x: Tensor, dim: int, sizes: Sequence[int]) -> TokenDim:
    tokens, dim = found(x), dim % x.dim()
    if tokens.dim != dim:
        return tokens if tokens.dim < dim else tokens.at(tokens.dim + len(sizes) - 1)
    count = x.shape[dim]
    known = [size if size != -1 else count // -math.prod(sizes) for size in sizes]
    inferred = sizes.index(-1) if -1 in sizes else None
    at = regrouped(tokens.at(0), (count,), known, inferred)
    return at.at(at.dim + dim)


def _reshaped(x: Tensor, *sizes: Any, **options: Any) -> TokenDim:
    given = options.get("shape", options.get("size", sizes))
    if len(given) == 1 and isinstance(given[0], Tensor):  # view_as
        given = given[0].shape
    elif len(given) == 1 and not isinstance(given[0], int):
        given = given[0]
    if isinstance(given, torch.dtype):
        raise MixedTokensError("reads the elements as another dtype", "")
    inferred = next((place for place, size in enumerate(given) if size == -1), None)
    if inferred is not None:
        given = [size if size != -1 else x.numel() // -math.prod(given) for size in given]
    return regrouped(found(x), x.shape, given, inferred)


#: by name of the function, without a trailing underscore
SHAPES: dict[str, Callable[..., TokenDim]] = {
    "repeat": _repeated, "tile": _repeated, "expand": _expanded, "expand_as": _expanded, "broadcast_to": _expanded,
    "repeat_interleave": _repeat_interleaved,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t"), _permuted(_swapped)),
    "permute": _permuted(given_dims), "movedim": _permuted(_moved), "moveaxis": _permuted(_moved),
    **dict.fromkeys(("view", "reshape", "view_as", "reshape_as", "_unsafe_view"), _reshaped),
    "flatten": _flattened, "unflatten": _unflattened, "ravel": lambda x: _flattened(x),
    "unsqueeze": _unsqueezed, "squeeze": _squeezed, "view_as_complex": _as_complex, "view_as_real": found,
}  # fmt: skip
