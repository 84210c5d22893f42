"""A message with arrays that is kept until the other end has taken it, so that it can be sent again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm.buffer_pool import BufferPool
from colossus.server.arrays import pack
from colossus.server.connection import Connection
from colossus.server.segments import LEAST_BYTES, SegmentPool
from colossus.server.wire import encode, frame

#: what is smaller travels with its header in one write
_SMALL_BYTES = 16 << 10


class Outgoing:
    """A message whose arrays have been copied.

    Args:
        kind: of its frame.
        fields: its header but for the arrays, which are described under ``a``.
        arrays: not needed any more when this is made.
        segments: where they are copied to if there is room; None: they go through the socket.
        buffers: where they are copied to otherwise.

    Raises:
        ValueError: it cannot be sent.

    Attributes:
        sequence: of the request that it is about; to be set before it is sent.
        held_bytes: of ``buffers``.
    """

    def __init__(
        self,
        kind: int,
        fields: dict[str, object],
        arrays: Sequence[Tensor],
        segments: SegmentPool | None,
        buffers: BufferPool,
    ) -> None:
        packing = pack(arrays)
        self._kind, self.sequence, self._num_bytes = kind, 0, packing.num_bytes
        self._header = encode({**fields, "a": packing.describe()} if arrays else fields)
        self._segments, self._buffers = segments, buffers
        self._segment = None
        if segments is not None and packing.num_bytes >= LEAST_BYTES:
            self._segment = segments.take(packing.num_bytes)
        self._buffer = None
        if self._segment is not None:
            packing.fill(self._segment.memory, arrays)
        elif packing.num_bytes:
            self._buffer = buffers.take(packing.num_bytes)
            packing.fill(self._buffer, arrays)
        self.held_bytes = 0 if self._buffer is None else packing.num_bytes

    def send(self, connection: Connection, takes_segments: bool) -> None:
        """Send it, once more perhaps."""
        size, segment = self._num_bytes, self._segment
        if segment is not None and takes_segments and connection.is_local:
            head = frame(self._kind, self._header, sequence=self.sequence, data_bytes=size, segment=segment.number)
            connection.send(head, segment=segment)
            return
        head = frame(self._kind, self._header, sequence=self.sequence, data_bytes=size)
        if not size:
            connection.send(head)
            return
        data = segment.memory[:size] if segment is not None else self._buffer
        assert data is not None
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        if size <= _SMALL_BYTES:
            connection.send(head + view)
        else:
            connection.send(head, view)

    def release(self) -> None:
        """The other end has taken it, or is gone: it is not sent any more."""
        if self._segment is not None and self._segments is not None:
            self._segments.give_back(self._segment)
        elif self._buffer is not None and self._num_bytes > _SMALL_BYTES:
            self._buffers.give_back(self._buffer)
        self._segment = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
