"""Tensors that travel together: their places in one buffer, and how many of them travel at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
#: dtype and shape of a tensor
Form = tuple[torch.dtype, torch.Size]

#: each dtype begins at a multiple of this many bytes
_ALIGNMENT = 64


def chunks(items: Iterable[T], size_of: Callable[[T], float], limit: float | None) -> Iterator[list[T]]:
    """Yield runs of consecutive items of at most ``limit`` together, or of one larger item; None: all at once."""
    chunk: list[T] = []
    total = 0.0
    for item in items:
        size = size_of(item)
        if chunk and limit is not None and total + size > limit:
            yield chunk
            chunk, total = [], 0.0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk


def split_as(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes of these tensors, one after the other."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


class FlatBuffer:
    """The places of tensors in a buffer of bytes, in which those of a dtype are contiguous.

    Args:
        forms: dtype and shape of each tensor.

    Attributes:
        nbytes: the size of the buffer.
        tensor_bytes: the bytes of the tensors alone.
    """

    def __init__(self, forms: Iterable[Form]) -> None:
        #: dtype -> index, shape and number of elements of each of its tensors
        by_dtype: dict[torch.dtype, list[tuple[int, torch.Size, int]]] = {}
        self._count = 0
        for dtype, shape in forms:
            by_dtype.setdefault(dtype, []).append((self._count, shape, shape.numel()))
            self._count += 1
        #: dtype, first byte, bytes, and tensors of each segment of the buffer
        self._segments: list[tuple[torch.dtype, int, int, list[tuple[int, torch.Size, int]]]] = []
        self.nbytes = self.tensor_bytes = 0
        for dtype, members in by_dtype.items():
            size = sum(numel for _, _, numel in members) * dtype.itemsize
            self._segments.append((dtype, self.nbytes, size, members))
            self.tensor_bytes += size
            self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> FlatBuffer:
        """Return the places of tensors like these."""
        return _flat_buffer(tuple((tensor.dtype, tensor.shape) for tensor in tensors))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the buffer, for accounting."""
        return max(self._segments, key=lambda segment: segment[2])[0] if self._segments else torch.uint8

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Return a flat view of the numbers of each dtype in a buffer, uint8 [at least ``nbytes``]."""
        return [buffer[start : start + size].view(dtype) for dtype, start, size, _ in self._segments]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return for each tensor a view of a buffer that has its shape."""
        views: list[Tensor] = [buffer] * self._count
        for part, (_, _, _, members) in zip(self.parts(buffer), self._segments, strict=True):
            pieces = part.split([numel for _, _, numel in members])
            for (index, shape, _), piece in zip(members, pieces, strict=True):
                views[index] = piece.view(shape)
        return views

    def memory_of(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        """Return the memory of such tensors on the host, which are contiguous, as the pieces of a buffer."""
        pieces: list[memoryview] = []
        for _, _, size, members in self._segments:
            pieces += [memoryview(flat_bytes(tensors[index]).numpy()) for index, _, numel in members if numel]  # type: ignore[arg-type]
            pieces.append(memoryview(bytearray(-size % _ALIGNMENT)))
        return pieces


@lru_cache(maxsize=1024)
def _flat_buffer(forms: tuple[Form, ...]) -> FlatBuffer:
    return FlatBuffer(forms)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, uint8 [bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)
