"""One connection between a worker and a server, after the greeting: frames in and out, and descriptors of segments."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator

from colossus.comm.peer_wire import WireError
from colossus.comm.send_queue import CHUNK, SendQueue
from colossus.server.frame_parser import Allocate, Frame, FrameParser
from colossus.server.segments import Segment
from colossus.server.wire import FORGET, PING, SEGMENT, encode, frame

#: descriptors that may come with one read, and that may wait to be spoken of
_MOST_DESCRIPTORS = 64
#: reads until others have their turn
_READS_AT_ONCE = 16
_ITEM = array("i").itemsize
_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _ITEM)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Connection:
    """Reads by one thread, writes from any.

    Args:
        stream: greeted; does not block.
        most_bytes: of the data of a frame.
        allocate: see `FrameParser`.
        on_backlog: called by who writes when the stream takes nothing more: `write` is to be called when it does.

    Attributes:
        last_heard, last_sent: `time.monotonic`.
        is_local: whether descriptors can be handed over.
    """

    def __init__(
        self, stream: socket.socket, most_bytes: int, allocate: Allocate, on_backlog: Callable[[], object]
    ) -> None:
        self.stream, self._on_backlog = stream, on_backlog
        self.is_local = stream.family == socket.AF_UNIX
        if not self.is_local:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last_heard = self.last_sent = time.monotonic()
        self._lock = threading.Lock()
        self._queue = SendQueue()
        self._is_broken = False
        #: segments that the other end knows
        self._told: set[int] = set()
        self._descriptors: list[int] = []
        self._parser = FrameParser(most_bytes, allocate)

    # -- out, from any thread -------------------------------------------------------------------------------

    def send(self, data: bytes, payload: memoryview | None = None, segment: Segment | None = None) -> None:
        """Send a frame, now or as soon as the stream takes it. What is sent on a broken connection is lost.

        Args:
            payload: the data that follow; must not change until the frame is answered.
            segment: in which the data lie instead; the other end is told of it first, where it was not.
        """
        with self._lock:
            waits = bool(self._queue)
            if segment is not None and segment.number not in self._told:
                self._tell(segment)
            self._queue.put(data)
            if payload is not None and len(payload):
                self._queue.put(payload)
            if not waits:
                self._write()
        if self._queue:
            self._on_backlog()

    def forget(self, numbers: list[int]) -> None:
        """Segments that are no more."""
        with self._lock:
            told = [number for number in numbers if number in self._told]
            self._told.difference_update(told)
        if told:
            self.send(frame(FORGET, encode(told)))

    def beat(self, seconds: float) -> None:
        """Give a sign of life if there was none for so long."""
        if time.monotonic() - self.last_sent > seconds and not self._queue:
            self.send(frame(PING))

    @property
    def has_backlog(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._queue)

    def write(self) -> None:
        """The stream takes more."""
        with self._lock:
            self._write()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have a selector tell, too, when the stream takes more, as long as something waits. By the thread that
        reads."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._queue else 0)
        key = selector.get_key(self.stream)
        if key.events != wanted:
            selector.modify(self.stream, wanted, key.data)

    def _tell(self, segment: Segment) -> None:
        descriptor = os.dup(segment.descriptor)
        self._told.add(segment.number)
        about = frame(SEGMENT, encode([segment.number, segment.size]))
        self._queue.put(about, lambda: os.close(descriptor), [descriptor])

    def _write(self) -> None:
        try:
            if not self._is_broken:
                self._queue.write(self.stream)
                self.last_sent = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:  # who reads will see it
            self._is_broken = True
        if self._is_broken:
            for done in self._queue.drop():
                done()

    # -- in, by the thread that reads -----------------------------------------------------------------------

    def read(self) -> Iterator[Frame]:
        """The frames that have come.

        Raises:
            EOFError: the other end has closed the connection.
            OSError: it is broken.
            WireError: nobody of ours sends this.
        """
        for _ in range(_READS_AT_ONCE):
            room = self._parser.room()[:CHUNK]
            try:
                size = self._receive(room) if self.is_local else self.stream.recv_into(room)
            except BlockingIOError:
                return
            if not size:
                raise EOFError("its connection was closed")
            self.last_heard = time.monotonic()
            yield from self._parser.advance(size)
            if size < len(room):
                return

    def take_descriptor(self) -> int:
        """The descriptor that came with a frame about a segment: the caller's to close.

        Raises:
            OSError: there is none: this process may open no more files.
        """
        if not self._descriptors:
            raise OSError("no descriptor has come with a segment of shared memory")
        return self._descriptors.pop(0)

    def _receive(self, room: memoryview) -> int:
        size, messages, _, _ = self.stream.recvmsg_into([room], _ROOM, _CLOSE_ON_EXEC)
        for level, kind, data in messages:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array("i")
                received.frombytes(data[: len(data) - len(data) % _ITEM])
                self._descriptors.extend(received)
        if len(self._descriptors) > _MOST_DESCRIPTORS:
            raise WireError("descriptors of files that nothing is said about")
        return size

    def close(self) -> None:
        """By the thread that reads, or after it."""
        with self._lock:
            self._is_broken = True
            for done in self._queue.drop():
                done()
            self.stream.close()
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors = []
