"""Zeros as parameters: a model of any size runs on them in little time and memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
#: operators that return uninitialised memory
EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
#: operators that use only the shape and dtype of their first tensor
SHAPE_ONLY = {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.new_zeros, _aten.new_ones,
    _aten.new_full, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
#: tags of operators that return Python numbers, or a shape that depends on values
ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: with operands of this many elements a result is set to zeros; zeros of more elements than the second take no memory
_LARGE, _HUGE = 1 << 20, 1 << 26
#: zeros of fewer elements have memory: a complex view needs it
_SMALL = 1 << 16


def put_zeros(model: nn.Module) -> None:
    """Replace parameters and buffers by zeros on the CPU."""
    zeros: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                if parameter not in zeros:
                    values = zeros_of(parameter.shape, parameter.dtype)
                    zeros[parameter] = nn.Parameter(values, parameter.requires_grad)
                del module._parameters[leaf]  # set anew: recurrent layers of torch list their weights
                setattr(module, leaf, zeros[parameter])
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                if buffer not in zeros:
                    zeros[buffer] = torch.zeros(buffer.shape, dtype=buffer.dtype)
                module._buffers[leaf] = zeros[buffer]


def zeros_of(shape: torch.Size, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """Return zeros that take no memory if they are large."""
    if shape.numel() < _SMALL:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation, or for large operands zeros of the shape that it has on the meta device."""
    if func is _aten._grouped_mm.default:  # torch has none of float64, and on meta only bfloat16
        return args[0].new_zeros((*args[0].shape[:-1], args[1].shape[-1]))
    sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    if sum(sizes) < _LARGE or is_view or ASKS.intersection(func.tags):
        return func(*args, **kwargs)
    try:
        out = func(
            *tree_map(_to_meta, args), **tree_map(_to_meta, kwargs | ({"device": _META} if "device" in kwargs else {}))
        )
    except NotImplementedError:
        return func(*args, **kwargs)
    return tree_map(_zeros_like_meta, out)


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    strides = leaf.stride() if leaf.is_contiguous() or 0 not in leaf.stride() else None
    if strides is None:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=_META)
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=_META)


def _zeros_like_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.numel() > _HUGE:
        return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()


def off_meta(leaf: Any) -> Any:
    """Return zeros on the CPU for a tensor on meta."""
    is_meta = isinstance(leaf, Tensor) and leaf.device.type == "meta"
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if is_meta else leaf
