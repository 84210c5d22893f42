"""Messages between workers and servers: requests and replies as frames of `colossus.comm.net`.

The head of a frame is JSON; its payload is tensors in a `FlatBuffer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossus.comm.flat_buffer import FlatBuffer, flat_bytes
from colossus.comm.host_staging import BufferPool
from colossus.comm.net import Stream
from colossus.comm.peer_gone import PeerGone


class ServerGone(PeerGone):
    """A server has ended, has failed, or is silent.

    Attributes:
        index: index of the server.
    """

    def __init__(self, index: int, address: str, reason: str) -> None:
        super().__init__(f"server {index} at {address} is gone: {reason}", index)


class Refused(RuntimeError):
    """A living server has refused this call. The message is that of `Request.fail`."""


@dataclass(frozen=True)
class Reply:
    """The answer of a server.

    Attributes:
        header: header that the handler has sent.
        arrays: the tensors of ``into``, if the call had some; else new ones, which the caller owns.
    """

    header: dict[str, Any]
    arrays: list[Tensor]


@dataclass(eq=False)
class Request:
    """A worker's request at a server's handler. It is answered once, at once or later.

    Attributes:
        worker: number of the worker.
        op: name of the operation.
        header: JSON data.
        arrays: contiguous tensors on the host, read-only, valid until the answer; a handler that keeps one clones it.
    """

    worker: int
    op: str
    header: dict[str, Any]
    arrays: list[Tensor]
    _answer: Callable[[dict[str, Any], Sequence[Tensor]], None] = field(repr=False)

    def reply(self, header: dict[str, Any] | None = None, arrays: Sequence[Tensor] = ()) -> None:
        """Answer the request. The arrays are copied before this returns. A worker that is gone receives nothing."""
        self._answer({"h": header or {}}, arrays)
        self.arrays = []

    def fail(self, error: Exception) -> None:
        """Refuse the request: the worker's call raises `Refused` with the message of this error."""
        self._answer({"e": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}, ())
        self.arrays = []


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape.

    Contiguous tensors are copied without torch's threads; other threads of this process run meanwhile.
    """
    target, source = target.detach(), source.detach()
    if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype and not source.is_conj():
        if target.numel():
            np.copyto(flat_bytes(target).numpy(), flat_bytes(source).numpy())
    else:
        target.copy_(source)


def send(stream: Stream, head: dict[str, Any], arrays: Sequence[Tensor], buffers: BufferPool) -> int:
    """Send a message and return the bytes of its arrays. They are on the host, and copied before this returns."""
    flat = FlatBuffer.of(arrays)
    described = [[str(array.dtype).removeprefix("torch."), list(array.shape)] for array in arrays]
    raw = json.dumps(head | {"a": described}, separators=(",", ":")).encode()
    if not flat.nbytes:
        stream.send(raw)
        return 0
    buffer = buffers.take(flat.nbytes)
    for view, tensor in zip(flat.views(buffer), arrays, strict=True):
        copy(view, tensor)
    stream.send(raw, [memoryview(buffer.numpy())], lambda: buffers.give_back(buffer))  # type: ignore[arg-type]
    return flat.nbytes


class Messages:
    """A receiver of messages at either end: see `colossus.comm.net.Receiver`.

    Args:
        buffers: pool of buffers for the payload.
        into_of: returns the reader's tensors that a message is written to, None for a new buffer.
        take: called with each message: its head, its arrays, and the buffer that they lie in, None if it is ``into``'s.
        end: see `Receiver.on_end`.
    """

    def __init__(
        self,
        buffers: BufferPool,
        into_of: Callable[[dict[str, Any]], Sequence[Tensor] | None],
        take: Callable[[dict[str, Any], list[Tensor], Tensor | None], object],
        end: Callable[[str | None], object],
    ) -> None:
        self._buffers, self._into_of, self._take, self._end = buffers, into_of, take, end
        self._payload: tuple[list[Tensor], Tensor | None] | None = None

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        described = json.loads(head)
        flat, into = _flat_buffer(described), self._into_of(described)
        if into is not None and all(tensor.is_contiguous() for tensor in into):
            self._payload = list(into), None
            return flat.memory_of(into)
        buffer = self._buffers.take(size)
        self._payload = flat.views(buffer), buffer
        return [memoryview(buffer.numpy())]  # type: ignore[arg-type]

    def on_frame(self, head: bytes) -> None:
        described = json.loads(head)
        payload, self._payload = self._payload, None
        if payload is None:  # the message has no payload
            payload = _flat_buffer(described).views(torch.empty(0, dtype=torch.uint8)), None
        self._take(described, *payload)

    def on_end(self, reason: str | None) -> None:
        self._end(reason)


def _flat_buffer(head: Mapping[str, Any]) -> FlatBuffer:
    """Return the places of the tensors that the head of a message describes."""
    return FlatBuffer((getattr(torch, name), torch.Size(shape)) for name, shape in head["a"])
