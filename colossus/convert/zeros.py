"""Zeros in the place of parameters: a model of any size runs on them in little time and memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
#: their result is numbers of Python, or has a shape by values
ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: elements of operands from which on a result is taken for zeros, and of zeros from which on they take no memory
_LARGE, _HUGE = 1 << 20, 1 << 26
#: elements of a parameter up to which its zeros have memory: a complex view wants it
_SMALL = 1 << 16


def put_zeros(model: nn.Module) -> None:
    """Put zeros on the CPU in the place of parameters and buffers."""
    zeros: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                if parameter not in zeros:
                    made = zeros_of(parameter.shape, parameter.dtype)
                    zeros[parameter] = nn.Parameter(made, parameter.requires_grad)
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
    """Return the result of an operation; of a large one zeros, whose shape is that on the meta device."""
    if func is _aten._grouped_mm.default:  # of float64 nowhere, on meta of bfloat16 alone
        return args[0].new_zeros((*args[0].shape[:-1], args[1].shape[-1]))
    sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_view = any(each.alias_info is not None for each in func._schema.returns)
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
    is_meta = isinstance(leaf, Tensor) and leaf.device.type == "meta"
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if is_meta else leaf
