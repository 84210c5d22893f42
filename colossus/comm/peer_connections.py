"""The connections of a rank to its peers, read and written by one thread: see `colossus.comm.peers`.

A connection carries messages in one direction: who sends makes it when there is something to send.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from torch import Tensor

from colossus.comm.peer_reader import FrameReader, Message
from colossus.comm.peer_wire import BYE, Header, WireError, hello

_log = logging.getLogger("colossus.comm")
_CHUNK = 1 << 20
#: how long a rank that closes waits until what it has sent is with the others
_CLOSE_SECONDS = 10.0

Done = Callable[[], None]


class Observer(Protocol):
    """Who is told of what happens, by the thread of the connections."""

    def buffer(self, size: int) -> Tensor:
        """Memory for a message, uint8 [size]."""

    def on_message(self, message: Message) -> None: ...

    def on_connection(self, source: int) -> None:
        """A peer has connected to this rank."""

    def on_farewell(self, source: int) -> None:
        """A peer has closed its links, and all that it sent has come."""

    def on_death(self, source: int, reason: str) -> None: ...

    def on_deaf(self, target: int, reason: str) -> None:
        """Nothing can be sent to a peer any more: it has died, or ended well."""

    def on_failure(self, error: BaseException) -> None:
        """The thread has ended by an error."""


@dataclass(eq=False)
class _Outgoing:
    stream: socket.socket | None = None
    #: what is left to be written, and what is to be called when a piece has been
    queue: deque[tuple[memoryview, Done | None]] = field(default_factory=deque)
    is_watched: bool = False
    #: nothing can be sent any more
    is_shut: bool = False


@dataclass(eq=False)
class _Incoming:
    stream: socket.socket
    reader: FrameReader


class PeerConnections:
    """Listens from the beginning; `start` begins to read and write.

    Args:
        host: address to listen at.
        me: index of this rank among ``num_ranks``.
        most_bytes: of the data of one message.
        observer: is told of what happens.

    Attributes:
        address: (host, port) at which this rank listens.
    """

    def __init__(self, host: str, me: int, num_ranks: int, most_bytes: int, observer: Observer) -> None:
        self._me, self._num_ranks, self._most_bytes, self._observer = me, num_ranks, most_bytes, observer
        self._outgoing = {index: _Outgoing() for index in range(num_ranks) if index != me}
        self._incoming: list[_Incoming] = []
        self._lock = threading.RLock()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(16, num_ranks))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._addresses: Sequence[tuple[str, int]] = ()
        self._key = b""
        self._thread = threading.Thread(target=self._run, name="colossus-peers", daemon=True)

    def start(self, addresses: Sequence[tuple[str, int]], key: bytes) -> None:
        """Begin.

        Args:
            addresses: of all ranks, by index.
            key: known to them alone.
        """
        self._addresses, self._key = addresses, key
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        self._thread.start()
        _open.add(self)

    # -- for any thread -----------------------------------------------------------------------------------

    def send(self, target: int, header: bytes, data: memoryview | None, done: Done) -> None:
        """Queue a message; ``done()`` is called, once, when it has been written or was dropped."""
        out = self._outgoing[target]
        with self._lock:
            if data is None:
                out.queue.append((memoryview(header), done))
            else:
                out.queue.extend([(memoryview(header), None), (data, done)])
        self._wake()

    def drop(self, target: int) -> None:
        """Send nothing more to a peer."""
        self._outgoing[target].is_shut = True
        self._wake()

    def backlog(self, target: int) -> int:
        """Bytes that wait to be written."""
        return sum(len(view) for view, _ in tuple(self._outgoing[target].queue))

    def close(self) -> None:
        """Write all that is queued, as long as somebody reads it, and say goodbye."""
        with self._lock:
            for out in self._outgoing.values():
                if (out.stream is not None or out.queue) and not out.is_shut:
                    out.queue.append((memoryview(Header(BYE, 0, 0, 0).pack()), None))
            self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(_CLOSE_SECONDS)
        self.close_streams()
        if not self._thread.is_alive():
            os.close(self._wake_write)

    def close_streams(self) -> None:
        for stream in (self._listener, *self._streams()):
            stream.close()

    def _streams(self) -> list[socket.socket]:
        made = [out.stream for out in self._outgoing.values() if out.stream is not None]
        return made + [incoming.stream for incoming in tuple(self._incoming)]

    def _wake(self) -> None:
        # it is awake already, or has ended
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._wake_write, b"w")

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        deadline = None
        try:
            while True:
                with self._lock:
                    for index in self._outgoing:
                        self._watch(index)
                    if self._closing:
                        deadline = deadline or time.monotonic() + _CLOSE_SECONDS
                        if not any(out.queue for out in self._outgoing.values()) or time.monotonic() > deadline:
                            break
                for key, _ in self._selector.select(0.5):
                    key.data()
        except BaseException as error:  # told by the main thread
            self._observer.on_failure(error)
        finally:
            self._selector.close()
            os.close(self._wake_read)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _watch(self, index: int) -> None:
        """Have a connection that is wanted, and be told when it can be written."""
        out = self._outgoing[index]
        if not out.queue:
            return
        if out.is_shut:
            self._drop_queue(out)
            return
        if out.stream is None:
            host, port = self._addresses[index]
            out.stream = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            out.stream.setblocking(False)
            out.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out.queue.appendleft((memoryview(hello(self._key, self._me, index)), None))
            out.stream.connect_ex((host, port))
        if not out.is_watched:
            out.is_watched = True
            self._selector.register(out.stream, selectors.EVENT_WRITE, lambda: self._write(index))

    def _write(self, index: int) -> None:
        out = self._outgoing[index]
        assert out.stream is not None
        try:
            while out.queue:
                view, done = out.queue[0]
                sent = out.stream.send(view[:_CHUNK])
                if sent < len(view):
                    out.queue[0] = (view[sent:], done)
                    continue
                out.queue.popleft()
                if done is not None:
                    done()
        except BlockingIOError:
            return
        except OSError as error:
            out.is_shut = True
            self._observer.on_deaf(index, f"nothing can be sent to it ({error.strerror or error})")
            self._drop_queue(out)
        self._selector.unregister(out.stream)
        out.is_watched = False

    def _drop_queue(self, out: _Outgoing) -> None:
        with self._lock:
            dropped = [done for _, done in out.queue if done is not None]
            out.queue.clear()
        for done in dropped:
            done()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                stream, _ = self._listener.accept()
                stream.setblocking(False)
                reader = FrameReader(self._me, self._num_ranks, self._key, self._most_bytes, self._observer.buffer)
                incoming = _Incoming(stream, reader)
                self._incoming.append(incoming)
                self._selector.register(stream, selectors.EVENT_READ, lambda incoming=incoming: self._read(incoming))

    def _read(self, incoming: _Incoming) -> None:
        reader = incoming.reader
        try:
            for _ in range(8):  # then others have their turn
                size = incoming.stream.recv_into(reader.missing[:_CHUNK])
                if not size:
                    self._ended(incoming, "its connection was closed")
                    return
                is_greeting = reader.source is None
                message = reader.advance(size)
                if message is not None:
                    self._observer.on_message(message)
                elif is_greeting and reader.source is not None:
                    self._observer.on_connection(reader.source)
        except BlockingIOError:
            return
        except WireError as error:
            _log.warning("something connected to the links between replicas and was dropped: %s", error)
            self._ended(incoming, f"it sent what no replica sends: {error}")
        except OSError as error:
            self._ended(incoming, f"its connection broke ({error.strerror or error})")

    def _ended(self, incoming: _Incoming, reason: str) -> None:
        self._selector.unregister(incoming.stream)
        self._incoming.remove(incoming)
        incoming.stream.close()
        reader = incoming.reader
        if reader.source is None:
            return
        if reader.said_bye:
            self._observer.on_farewell(reader.source)
        else:
            self._observer.on_death(reader.source, reason)


_open: WeakSet[PeerConnections] = WeakSet()


def _close_in_child() -> None:
    """A forked process (a data loader's worker) must not keep the connections of a rank that dies."""
    for connections in tuple(_open):
        connections.close_streams()


os.register_at_fork(after_in_child=_close_in_child)
