"""What workers and servers say to each other: requests and replies as frames of `colossus.comm.net`.

The head of a frame is JSON; its payload is tensors, one after the other, each aligned.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossus.comm.host_staging import BufferPool
from colossus.comm.net import Stream, WireError

_MOST_HEAD_BYTES = 1 << 20
_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ServerGone(RuntimeError):
    """A server has ended, has failed, or gives no sign of life.

    Attributes:
        index: of the server.
        address: at which it was reached.
        reason: in words, without index and address.
        last_sign: `time.monotonic` when something last came from it; None when nothing ever did.
    """

    def __init__(self, index: int, address: str, reason: str, last_sign: float | None = None) -> None:
        self.index, self.address, self.reason, self.last_sign = index, address, reason, last_sign
        seen = "nothing ever came from it"
        if last_sign is not None:
            seen = f"the last sign of life came {max(0.0, time.monotonic() - last_sign):.1f} s ago"
        super().__init__(f"server {index} at {address} is gone: {reason} ({seen})")


class Refused(RuntimeError):
    """The server lives, and has refused this call: its handler has said why by `Request.fail`."""


@dataclass(frozen=True)
class Reply:
    """What a server has answered.

    Attributes:
        header: as the handler gave it.
        arrays: where the call was given ``into``, those tensors; else new ones, the caller's own.
    """

    header: dict[str, Any]
    arrays: list[Tensor]


@dataclass(eq=False)
class Request:
    """What a worker asks for, as the handler of a server gets it. It is answered once, at once or later.

    Attributes:
        worker: its number.
        op: what is asked for.
        header: data of JSON.
        arrays: on the host, contiguous; only to be read, and valid until the answer. Who keeps one longer clones it.
    """

    worker: int
    op: str
    header: dict[str, Any]
    arrays: list[Tensor]
    _answer: Callable[[dict[str, Any], Sequence[Tensor]], None] = field(repr=False)
    _is_answered: bool = field(default=False, repr=False)

    def reply(self, header: dict[str, Any] | None = None, arrays: Sequence[Tensor] = ()) -> None:
        """Answer. The arrays are copied before this returns. A worker that is gone is answered in silence."""
        self._once({"h": header or {}}, arrays)

    def fail(self, message: str) -> None:
        """Refuse the request: the result of the worker's call is `Refused`, with this message."""
        self._once({"e": message}, ())

    def _once(self, head: dict[str, Any], arrays: Sequence[Tensor]) -> None:
        if self._is_answered:
            raise RuntimeError(f"the request {self.op!r} of worker {self.worker} was answered already")
        self._is_answered = True
        self._answer(head, arrays)
        self.arrays = []


class Packing:
    """Where tensors of some dtypes and shapes lie in a buffer.

    Attributes:
        num_bytes: of the buffer, with what alignment takes.
    """

    def __init__(self, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._kinds = list(kinds)
        self._spans, self.num_bytes = [], 0
        for dtype, shape in self._kinds:
            size = math.prod(shape) * dtype.itemsize
            self._spans.append((self.num_bytes, self.num_bytes + size))
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Packing:
        """
        Raises:
            ValueError: for what cannot be sent.
        """
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device}: dense ones of the host are")
            if tensor.dtype not in _NAMES:
                raise ValueError(f"a tensor of dtype {tensor.dtype}, where {', '.join(_DTYPES)} can be sent")
        return cls([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])

    @classmethod
    def described(cls, described: Any, most_bytes: int) -> Packing:
        """The opposite of `describe`.

        Raises:
            WireError: it describes no tensors, or more than ``most_bytes``.
        """
        kinds, total = [], 0
        try:
            if not isinstance(described, list):
                raise TypeError
            for name, shape in described:
                dtype, sizes = _DTYPES[name], tuple(shape)
                if type(shape) is not list or not all(type(size) is int and size >= 0 for size in sizes):
                    raise ValueError
                total += math.prod(max(1, size) for size in sizes) * dtype.itemsize  # as if none were 0: strides, too
                kinds.append((dtype, sizes))
        except (ValueError, TypeError, KeyError) as error:
            raise WireError("arrays that are not described by dtypes and shapes") from error
        if total > most_bytes:
            raise WireError(f"arrays of more than {most_bytes} bytes")
        return cls(kinds)

    def describe(self) -> list[Any]:
        """As JSON: dtype and shape of each."""
        return [[_NAMES[dtype], list(shape)] for dtype, shape in self._kinds]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, uint8 [at least ``num_bytes``]."""
        return [
            buffer[start:stop].view(dtype).view(shape)
            for (dtype, shape), (start, stop) in zip(self._kinds, self._spans, strict=True)
        ]

    def targets(self, tensors: Sequence[Tensor]) -> list[memoryview] | None:
        """The memory of tensors as a buffer in pieces; None where they are others, or not contiguous."""
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] != self._kinds:
            return None
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
        pieces: list[memoryview] = []
        for tensor, (start, stop) in zip(tensors, self._spans, strict=True):
            if stop > start:
                pieces.append(memoryview(_flat_bytes(tensor).numpy()))  # type: ignore[arg-type]
                pieces.append(memoryview(bytearray(-stop % _ALIGNMENT)))
        return pieces


def copy(target: Tensor, source: Tensor) -> None:
    """Of the same shape. Other threads run meanwhile, and none of torch's own are used where both are contiguous."""
    target, source = target.detach(), source.detach()
    if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype and not source.is_conj():
        if target.numel():
            np.copyto(_flat_bytes(target).numpy(), _flat_bytes(source).numpy())
    else:
        target.copy_(source)


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def send(stream: Stream, head: dict[str, Any], arrays: Sequence[Tensor], buffers: BufferPool) -> int:
    """Send a message; the arrays are copied before this returns. Returns their bytes.

    Raises:
        ValueError: the head is no data of JSON, or too long, or an array cannot be sent.
    """
    packing = Packing.of(arrays)
    try:
        raw = json.dumps(head | {"a": packing.describe()}, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a header must be data of JSON: {error}") from error
    if len(raw) > _MOST_HEAD_BYTES:
        raise ValueError(f"a header of {len(raw)} bytes as JSON, where at most {_MOST_HEAD_BYTES} can be sent")
    if not packing.num_bytes:
        stream.send(raw)
        return 0
    buffer = buffers.take(packing.num_bytes)
    for view, tensor in zip(packing.views(buffer), arrays, strict=True):
        copy(view, tensor)
    stream.send(raw, [memoryview(buffer.numpy())], lambda: buffers.give_back(buffer))  # type: ignore[arg-type]
    return packing.num_bytes


class Messages:
    """What both ends make of frames: see `colossus.comm.net.Receiver`.

    Args:
        most_bytes: of the arrays of one message.
        into_of: tensors of the reader's, to which those of a message go if they fit.
        take: is told of each message: its head, its arrays, and the memory that they lie in, None if it is ``into``'s.
        end: see `Receiver.on_end`.
    """

    def __init__(
        self,
        buffers: BufferPool,
        most_bytes: int,
        into_of: Callable[[dict[str, Any]], Sequence[Tensor] | None],
        take: Callable[[dict[str, Any], list[Tensor], Tensor | None], object],
        end: Callable[[str | None], object],
    ) -> None:
        self._buffers, self._most_bytes, self._into_of = buffers, most_bytes, into_of
        self._take, self._end = take, end
        self._came: tuple[list[Tensor], Tensor | None] | None = None

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        described = _decode(head)
        packing = Packing.described(described.get("a", []), self._most_bytes)
        if packing.num_bytes != size:
            raise WireError("arrays of another length than their description")
        into = self._into_of(described)
        if into is not None and (pieces := packing.targets(into)) is not None:
            self._came = list(into), None
            return pieces
        buffer = self._buffers.take(size)
        self._came = packing.views(buffer), buffer
        return [memoryview(buffer.numpy())]  # type: ignore[arg-type]

    def on_frame(self, head: bytes) -> None:
        described = _decode(head)
        if self._came is None:  # no bytes have come
            packing = Packing.described(described.get("a", []), self._most_bytes)
            if packing.num_bytes:
                raise WireError("arrays that have not come")
            self._came = packing.views(torch.empty(0, dtype=torch.uint8)), None
        came, self._came = self._came, None
        self._take(described, *came)

    def on_end(self, reason: str | None) -> None:
        self._end(reason)


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        head = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a header that is no JSON ({type(error).__name__})") from error
    if not isinstance(head, dict):
        raise WireError("a header that is no object")
    return head
