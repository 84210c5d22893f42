"""The messages between workers and servers as frames of `colossus.comm.net`: a head of JSON, and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.comm.buffer_pool import BufferPool
from colossus.comm.net import Stream, WireError
from colossus.server.arrays import Packing, pack, unpack

_MOST_HEAD_BYTES = 1 << 20


def encode(head: dict[str, Any], packing: Packing) -> bytes:
    """
    Raises:
        ValueError: it is no data of JSON, or too long.
    """
    try:
        text = json.dumps(head | {"a": packing.describe()}, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a header must be data of JSON: {error}") from error
    if len(text) > _MOST_HEAD_BYTES:
        raise ValueError(
            f"a header of {len(text)} bytes as JSON, where at most {_MOST_HEAD_BYTES} can be sent: what is large goes "
            "into the arrays"
        )
    return text


def send(stream: Stream, head: dict[str, Any], arrays: Sequence[Tensor], buffers: BufferPool) -> int:
    """Send a message; the arrays are copied before this returns. Returns their bytes."""
    packing = pack(arrays)
    raw = encode(head, packing)
    if not packing.num_bytes:
        stream.send(raw)
        return 0
    buffer = buffers.take(packing.num_bytes)
    packing.fill(buffer, arrays)
    payload = memoryview(buffer.numpy())  # type: ignore[arg-type]
    stream.send(raw, [payload], lambda: buffers.give_back(buffer))
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
        self._arrays: list[Tensor] = []
        self._buffer: Tensor | None = None

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        described = decode(head)
        packing = unpack(described.get("a"), self._most_bytes)
        if packing.num_bytes != size:
            raise WireError("arrays of another length than their description")
        into = self._into_of(described)
        if into is not None and packing.fits(into) and (pieces := packing.targets(into)) is not None:
            self._arrays = list(into)
            return pieces
        self._buffer = self._buffers.take(size)
        self._arrays = packing.views(self._buffer)
        return [memoryview(self._buffer.numpy())]  # type: ignore[arg-type]

    def on_frame(self, head: bytes) -> None:
        described, arrays, buffer = decode(head), self._arrays, self._buffer
        self._arrays, self._buffer = [], None
        if not arrays and described.get("a"):  # of no bytes
            arrays = unpack(described["a"], 0).views(torch.empty(0, dtype=torch.uint8))
        self._take(described, arrays, buffer)

    def on_end(self, reason: str | None) -> None:
        self._end(reason)


def decode(raw: bytes) -> dict[str, Any]:
    try:
        head = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a header that is no JSON ({type(error).__name__})") from error
    if not isinstance(head, dict):
        raise WireError("a header that is no object")
    return head
