"""The connections of a rank to its peers, read and written by one thread: see `colossus.comm.peers`.

A connection carries messages in one direction: who sends makes it when there is something to send.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from colossus.comm.forked import close_in_children
from colossus.comm.peer_listener import Observer, PeerListener
from colossus.comm.peer_wire import BYE, Header, hello
from colossus.comm.send_queue import Done, SendQueue
from colossus.comm.wake import Wake

#: how long a rank that closes waits until what it has sent is with the others
_CLOSE_SECONDS = 10.0


@dataclass(eq=False)
class _Outgoing:
    stream: socket.socket | None = None
    queue: SendQueue = field(default_factory=SendQueue)
    is_watched: bool = False
    #: nothing can be sent any more
    is_shut: bool = False


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
        self._me, self._observer = me, observer
        self._outgoing = {index: _Outgoing() for index in range(num_ranks) if index != me}
        self._lock = threading.RLock()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._incoming = PeerListener(self._selector, host, me, num_ranks, most_bytes, observer)
        self.address = self._incoming.address
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
        self._incoming.start(key)
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake.drain)
        self._thread.start()
        close_in_children(self)

    # -- for any thread -----------------------------------------------------------------------------------

    def send(self, target: int, header: bytes, data: memoryview | None, done: Done) -> None:
        """Queue a message; ``done()`` is called, once, when it has been written or was dropped."""
        out = self._outgoing[target]
        with self._lock:
            if data is None:
                out.queue.put(header, done)
            else:
                out.queue.put(header)
                out.queue.put(data, done)
        self._wake.call()

    def drop(self, target: int) -> None:
        """Send nothing more to a peer."""
        self._outgoing[target].is_shut = True
        self._wake.call()

    def backlog(self, target: int) -> int:
        """Bytes that wait to be written."""
        return self._outgoing[target].queue.num_bytes

    def close(self) -> None:
        """Write all that is queued, as long as somebody reads it, and say goodbye."""
        with self._lock:
            for out in self._outgoing.values():
                if (out.stream is not None or out.queue) and not out.is_shut:
                    out.queue.put(Header(BYE, 0, 0, 0).pack())
            self._closing = True
        if self._thread.is_alive():
            self._wake.call()
            self._thread.join(_CLOSE_SECONDS)
        self._close_streams()
        if not self._thread.is_alive():
            self._close_reading()
            self._wake.close()

    def _close_streams(self) -> None:
        self._incoming.close()
        for out in self._outgoing.values():
            if out.stream is not None:
                out.stream.close()

    def close_in_child(self) -> None:
        """After a fork, where the thread does not run."""
        self._close_streams()
        self._close_reading()
        self._wake.close()

    def _close_reading(self) -> None:
        self._selector.close()
        self._wake.close_reading()

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
                self._incoming.door.look_around()
        except BaseException as error:  # told by the main thread
            self._observer.on_failure(error)
        finally:
            self._close_reading()

    def _watch(self, index: int) -> None:
        """Have a connection that is wanted, and be told when it can be written."""
        out = self._outgoing[index]
        if not out.queue:
            return
        if out.is_shut:
            self._drop_queue(out)
            return
        if out.stream is None:
            if self._incoming.door.is_paused:
                return
            host, port = self._addresses[index]
            try:
                out.stream = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            except OSError as error:
                self._incoming.door.pause(error)
                return
            out.stream.setblocking(False)
            out.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out.queue.put_first(hello(self._key, self._me, index))
            out.stream.connect_ex((host, port))
        if not out.is_watched:
            out.is_watched = True
            self._selector.register(out.stream, selectors.EVENT_WRITE, lambda: self._write(index))

    def _write(self, index: int) -> None:
        out = self._outgoing[index]
        assert out.stream is not None
        try:
            out.queue.write(out.stream)
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
            dropped = out.queue.drop()
        for done in dropped:
            done()
