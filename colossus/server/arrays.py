"""Tensors as bytes: described by dtype and shape, one after the other, each aligned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossus.comm.net import WireError

_ALIGNMENT = 64
_MOST_DIMS = 64
_MOST_ARRAYS = 1 << 14

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Packing:
    """Where tensors lie in a buffer.

    Attributes:
        dtypes, shapes: of the tensors.
        offsets, sizes: in bytes.
        num_bytes: of all, with what alignment takes.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int

    def describe(self) -> list[list[Any]]:
        """As JSON: dtype and shape of each."""
        return [[_NAMES[dtype], list(shape)] for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, uint8 [at least ``num_bytes``]."""
        return [
            buffer[offset : offset + size].view(dtype).view(shape)
            for dtype, shape, offset, size in zip(self.dtypes, self.shapes, self.offsets, self.sizes, strict=True)
        ]

    def fill(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into a buffer. Other threads run meanwhile."""
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            copy(view, tensor)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors are of these dtypes and shapes."""
        here = list(zip(self.dtypes, self.shapes, strict=True))
        return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == here

    def targets(self, tensors: Sequence[Tensor]) -> list[memoryview] | None:
        """The memory of tensors as a buffer in pieces, None where it is not contiguous."""
        pieces: list[memoryview] = []
        at = 0
        for tensor, offset, size in zip(tensors, self.offsets, self.sizes, strict=True):
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                return None
            if offset > at:
                pieces.append(memoryview(bytearray(offset - at)))
            if size:
                pieces.append(memoryview(flat_bytes(tensor).numpy()))  # type: ignore[arg-type]
            at = offset + size
        if self.num_bytes > at:
            pieces.append(memoryview(bytearray(self.num_bytes - at)))
        return pieces


def pack(tensors: Sequence[Tensor]) -> Packing:
    """How tensors are sent.

    Raises:
        ValueError: for what cannot be.
    """
    if len(tensors) > _MOST_ARRAYS:
        raise ValueError(f"{len(tensors)} arrays, where one message has at most {_MOST_ARRAYS}")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"an array must be a tensor, not {type(tensor).__name__}")
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor on {tensor.device}: tensors must be copied to the host before they are sent")
        if tensor.layout is not torch.strided:
            raise ValueError(f"a tensor of layout {tensor.layout}: its parts must be sent as dense tensors")
        if tensor.dtype not in _NAMES:
            raise ValueError(f"a tensor of dtype {tensor.dtype}, where {', '.join(_DTYPES)} can be sent")
    return _packing([tensor.dtype for tensor in tensors], [tuple(tensor.shape) for tensor in tensors])


def unpack(described: object, most_bytes: int) -> Packing:
    """How tensors were sent; the opposite of `Packing.describe`.

    Raises:
        WireError: it describes no tensors, or more than ``most_bytes``.
    """
    if not isinstance(described, list) or len(described) > _MOST_ARRAYS:
        raise WireError("arrays that are no list, or too many")
    dtypes, shapes, total = [], [], 0
    for entry in described:
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise WireError("an array that is not described by its dtype and shape")
        name, shape = entry
        if name not in _DTYPES:
            raise WireError(f"an array of dtype {name[:20]!r}")
        if not isinstance(shape, list) or len(shape) > _MOST_DIMS:
            raise WireError("an array whose shape is no list, or too long")
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
            raise WireError("an array with a negative or huge size, or one that is no number")
        # as if no size were 0: strides must not overflow either
        if math.prod(max(1, size) for size in shape) >= 1 << 60:
            raise WireError("an array of a huge shape")
        total += math.prod(shape) * _DTYPES[name].itemsize + _ALIGNMENT
        if total > most_bytes + _ALIGNMENT * len(described):
            raise WireError(f"arrays of more than {most_bytes} bytes")
        dtypes.append(_DTYPES[name])
        shapes.append(tuple(shape))
    return _packing(dtypes, shapes)


def copy(target: Tensor, source: Tensor) -> None:
    """Of the same shape. Other threads run meanwhile, and none of torch's own are used where both are contiguous."""
    target, source = target.detach(), source.detach()
    if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype and not source.is_conj():
        if target.numel():
            np.copyto(flat_bytes(target).numpy(), flat_bytes(source).numpy())
    else:
        target.copy_(source)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _packing(dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]) -> Packing:
    offsets, sizes, at = [], [], 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        offsets.append(at)
        sizes.append(size)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Packing(tuple(dtypes), tuple(shapes), tuple(offsets), tuple(sizes), at)
