"""What is still to be written to a stream that does not block."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CHUNK = 1 << 20

Done = Callable[[], None]


@dataclass(eq=False)
class _Piece:
    view: memoryview
    done: Done | None
    descriptors: Sequence[int]


class SendQueue:
    """Pieces in their order. `put` and `take` may be called by one thread while another is in `write`, for a queue
    that does not become empty in between; else the caller holds a lock."""

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()

    def put(self, data: bytes | memoryview, done: Done | None = None, descriptors: Sequence[int] = ()) -> None:
        """Add bytes at the end.

        Args:
            data: bytes, or a view of format ``B``, which must not change any more.
            done: called once they are written.
            descriptors: of files, handed over with the first of the bytes (UNIX streams only).
        """
        self._pieces.append(_Piece(memoryview(data), done, descriptors))

    def put_first(self, data: bytes) -> None:
        self._pieces.appendleft(_Piece(memoryview(data), None, ()))

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def num_bytes(self) -> int:
        """That wait."""
        return sum(len(piece.view) for piece in tuple(self._pieces))

    def write(self, stream: socket.socket) -> None:
        """Write until all is written, or the stream takes nothing more.

        Raises:
            BlockingIOError: it takes nothing more.
            OSError: it is broken.
        """
        while self._pieces:
            piece = self._pieces[0]
            if piece.descriptors:
                sent = socket.send_fds(stream, [piece.view], piece.descriptors)
                piece.descriptors = ()
            else:
                sent = stream.send(piece.view[:CHUNK])
            if sent < len(piece.view):
                piece.view = piece.view[sent:]
                continue
            self._pieces.popleft()
            if piece.done is not None:
                piece.done()

    def drop(self) -> list[Done]:
        """Forget all; returns what is to be called for it."""
        dropped = [piece.done for piece in self._pieces if piece.done is not None]
        self._pieces.clear()
        return dropped
