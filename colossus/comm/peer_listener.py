"""Who connects to a rank, and what comes from it: see `colossus.comm.peer_connections`."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from colossus.comm.peer_reader import FrameReader, Message
from colossus.comm.peer_wire import WireError

_log = logging.getLogger("colossus.comm")
_CHUNK = 1 << 20
#: within which who connects must have said who it is
_GREETING_SECONDS = 10.0
#: connections that are accepted before those there are have their turn
_ACCEPT_AT_ONCE = 8
#: until the system is asked again for a connection that it could not make
_PAUSE_SECONDS = 1.0


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
class _Incoming:
    stream: socket.socket
    reader: FrameReader
    since: float = field(default_factory=time.monotonic)


class PeerListener:
    """Listens from the beginning; after `start` what comes is read by who calls what the selector gives.

    Whoever connects must say within `_GREETING_SECONDS` who it is, and of those that have not there are at most
    ``2 * num_ranks + 16``: the oldest gives way, so that strangers can neither keep peers out nor use up what the
    process may open.

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
        #: of these, who has not said who it is, from the oldest on
        self._unknown: list[_Incoming] = []
        self._most_unknown = 2 * num_ranks + 16
        #: when the system is asked again for connections, and what it said last
        self._paused_until: float | None = None
        self._refusal = ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(16, num_ranks))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def start(self, key: bytes) -> None:
        """Begin to accept those who know the key."""
        self._key = key
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close what is open, in whichever process."""
        for stream in (self._listener, *(incoming.stream for incoming in tuple(self._incoming))):
            stream.close()

    @property
    def is_paused(self) -> bool:
        """Whether the system has given no connection just now."""
        return self._paused_until is not None

    def pause(self, error: OSError) -> None:
        """The system gives no connection: too many files are open, for example. It is asked again later."""
        if str(error) != self._refusal:
            self._refusal = str(error)
            _log.warning("the links between replicas cannot make a connection and try it again: %s", error)
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def look_around(self) -> None:
        """To be called again and again: accept after a pause, and close what does not say who it is."""
        now = time.monotonic()
        if self._paused_until is not None and now > self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while self._unknown:
            oldest = self._unknown[0]
            if len(self._unknown) <= self._most_unknown and now - oldest.since <= _GREETING_SECONDS:
                return
            self._read(oldest)  # it may have just said so
            if oldest in self._unknown:
                _log.warning("something connected to the links between replicas, said nothing, and was dropped")
                self._ended(oldest, "it did not say who it is")

    def _accept(self) -> None:
        try:
            for _ in range(_ACCEPT_AT_ONCE):
                stream, _ = self._listener.accept()
                stream.setblocking(False)
                reader = FrameReader(self._me, self._num_ranks, self._key, self._most_bytes, self._observer.buffer)
                incoming = _Incoming(stream, reader)
                self._incoming.append(incoming)
                self._unknown.append(incoming)
                self._selector.register(stream, selectors.EVENT_READ, lambda incoming=incoming: self._read(incoming))
        except BlockingIOError:
            return
        except OSError as error:
            self.pause(error)

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
                    self._unknown.remove(incoming)
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
            self._unknown.remove(incoming)
        elif reader.said_bye:
            self._observer.on_farewell(reader.source)
        else:
            self._observer.on_death(reader.source, reason)
