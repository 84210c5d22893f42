"""Who connects to a rank, and what comes from it: see `colossus.comm.peer_connections`."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from typing import Protocol

from torch import Tensor

from colossus.comm.door import Door
from colossus.comm.peer_reader import FrameReader, Message
from colossus.comm.peer_wire import WireError

_log = logging.getLogger("colossus.comm")
_CHUNK = 1 << 20


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


class _Incoming:
    """A connection from a peer, or from whoever has connected."""

    def __init__(self, listener: PeerListener, stream: socket.socket, reader: FrameReader) -> None:
        self._listener, self.stream, self.reader = listener, stream, reader
        self.since = time.monotonic()

    def read(self) -> None:
        self._listener.read(self)

    def turn_away(self) -> None:
        self._listener.ended(self, "it did not say who it is")


class PeerListener:
    """Listens from the beginning; after `start` what comes is read by who calls what the selector gives.

    Strangers are kept out by a `Door`.

    Args:
        selector: whose keys' data are functions to be called.
        host: address to listen at.
        me: index of this rank among ``num_ranks``.
        most_bytes: of the data of one message.
        observer: is told of what happens.

    Attributes:
        address: (host, port) at which this rank listens.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host: str,
        me: int,
        num_ranks: int,
        most_bytes: int,
        observer: Observer,
    ) -> None:
        self._selector, self._observer = selector, observer
        self._me, self._num_ranks, self._most_bytes, self._key = me, num_ranks, most_bytes, b""
        self._incoming: list[_Incoming] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(16, num_ranks))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.door = Door(selector, self._listener, 2 * num_ranks + 16, self._enter, "the links between replicas")

    def start(self, key: bytes) -> None:
        """Begin to accept those who know the key."""
        self._key = key
        self.door.open()

    def close(self) -> None:
        """Close what is open, in whichever process."""
        for stream in (self._listener, *(incoming.stream for incoming in tuple(self._incoming))):
            stream.close()

    def _enter(self, stream: socket.socket) -> _Incoming:
        reader = FrameReader(self._me, self._num_ranks, self._key, self._most_bytes, self._observer.buffer)
        incoming = _Incoming(self, stream, reader)
        self._incoming.append(incoming)
        self._selector.register(stream, selectors.EVENT_READ, incoming.read)
        return incoming

    def read(self, incoming: _Incoming) -> None:
        reader = incoming.reader
        try:
            for _ in range(8):  # then others have their turn
                size = incoming.stream.recv_into(reader.missing[:_CHUNK])
                if not size:
                    self.ended(incoming, "its connection was closed")
                    return
                is_greeting = reader.source is None
                message = reader.advance(size)
                if message is not None:
                    self._observer.on_message(message)
                elif is_greeting and reader.source is not None:
                    self.door.forget(incoming)
                    self._observer.on_connection(reader.source)
        except BlockingIOError:
            return
        except WireError as error:
            _log.warning("something connected to the links between replicas and was dropped: %s", error)
            self.ended(incoming, f"it sent what no replica sends: {error}")
        except OSError as error:
            self.ended(incoming, f"its connection broke ({error.strerror or error})")

    def ended(self, incoming: _Incoming, reason: str) -> None:
        self._selector.unregister(incoming.stream)
        self._incoming.remove(incoming)
        incoming.stream.close()
        reader = incoming.reader
        if reader.source is None:
            self.door.forget(incoming)
        elif reader.said_bye:
            self._observer.on_farewell(reader.source)
        else:
            self._observer.on_death(reader.source, reason)
