"""Frames out of the bytes of a connection, as they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colossus.comm.peer_wire import WireError
from colossus.server.wire import HEAD_BYTES, Head, read_header

#: heads, headers and small data are read many at once
_BUFFER_BYTES = 64 << 10
#: what misses so many bytes is read to where it belongs
_DIRECT_BYTES = 16 << 10


@dataclass(eq=False)
class Frame:
    """What has come.

    Attributes:
        context: what ``allocate`` has returned beside the memory; None where no data followed.
    """

    head: Head
    header: Any
    context: Any = None


#: (head, header) -> memory for the data that follow, in pieces; and what is to be known of it later
Allocate = Callable[[Head, Any], tuple[list[memoryview], Any]]


class FrameParser:
    """A connection in the midst of a frame.

    Args:
        most_bytes: of the data of a frame.
        allocate: called for each frame that data follow, before they are read.
    """

    def __init__(self, most_bytes: int, allocate: Allocate) -> None:
        self._most_bytes, self._allocate = most_bytes, allocate
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._head: Head | None = None
        self._frame: Frame | None = None
        #: memory that is still to be filled with data
        self._pieces: list[memoryview] = []
        self._is_direct = False

    def room(self) -> memoryview:
        """Where the bytes that come next belong."""
        self._is_direct = self._start == self._end and bool(self._pieces) and len(self._pieces[0]) >= _DIRECT_BYTES
        if self._is_direct:
            return self._pieces[0]
        if self._start:
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        return self._buffer[self._end :]

    def advance(self, size: int) -> list[Frame]:
        """``size`` bytes have been written to `room`.

        Returns:
            The frames that are complete with them.

        Raises:
            WireError: for bytes that nobody of ours sends.
        """
        frames: list[Frame] = []
        if self._is_direct:
            self._fill(size)
        else:
            self._end += size
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        while self._pieces:
            size = min(len(self._pieces[0]), self._end - self._start)
            if not size:
                return None
            self._pieces[0][:size] = self._buffer[self._start : self._start + size]
            self._start += size
            self._fill(size)
        if self._frame is not None:
            return self._complete()
        if self._head is None:
            if self._end - self._start < HEAD_BYTES:
                return None
            self._head = Head.unpack(self._take(HEAD_BYTES), self._most_bytes)
            if self._head.header_bytes > len(self._buffer):
                larger = memoryview(bytearray(self._head.header_bytes))
                larger[: self._end - self._start] = self._buffer[self._start : self._end]
                self._buffer, self._start, self._end = larger, 0, self._end - self._start
        if self._end - self._start < self._head.header_bytes:
            return None
        self._frame = Frame(self._head, read_header(bytes(self._take(self._head.header_bytes))))
        if not self._head.following_bytes:
            return self._complete()
        pieces, self._frame.context = self._allocate(self._head, self._frame.header)
        if sum(map(len, pieces)) != self._head.following_bytes:
            raise WireError("data of another length than their description")
        self._pieces = [piece for piece in pieces if len(piece)]
        return self._next()

    def _fill(self, size: int) -> None:
        """The first bytes of what is missing have come."""
        if size == len(self._pieces[0]):
            del self._pieces[0]
        else:
            self._pieces[0] = self._pieces[0][size:]

    def _take(self, size: int) -> memoryview:
        taken = self._buffer[self._start : self._start + size]
        self._start += size
        return taken

    def _complete(self) -> Frame:
        frame, self._head, self._frame = self._frame, None, None
        assert frame is not None
        return frame
