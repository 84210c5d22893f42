"""Who may come in: accepts connections, and keeps those who do not say who they are from using up what there is."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger("colossus.comm")
#: within which who connects must have said who it is
GREETING_SECONDS = 10.0
#: connections that are accepted before those there are have their turn
_ACCEPT_AT_ONCE = 8
#: until the system is asked again for a connection that it could not make
_PAUSE_SECONDS = 1.0


class Caller(Protocol):
    """A connection that was accepted."""

    since: float

    def read(self) -> None:
        """Read what has come."""

    def turn_away(self) -> None:
        """Close it: it did not say who it is."""


class Door:
    """Watches a listening socket.

    Whoever connects must say within `GREETING_SECONDS` who it is, and of those that have not there are at most
    ``most_unknown``: the oldest gives way, so that strangers can neither keep others out nor use up what the
    process may open.

    Args:
        selector: whose keys' data are functions to be called.
        listener: does not block.
        most_unknown: connections that have not said who they are.
        enter: makes the caller of a connection, and has it watched.
        name: of what is behind the door, for the log.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        most_unknown: int,
        enter: Callable[[socket.socket], Caller],
        name: str,
    ) -> None:
        self._selector, self._listener, self._enter, self._name = selector, listener, enter, name
        self._most_unknown = most_unknown
        #: who has not said who it is, from the oldest on
        self._unknown: list[Caller] = []
        #: when the system is asked again for connections, and what it said last
        self._paused_until: float | None = None
        self._refusal = ""

    def open(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def shut(self) -> None:
        """Accept nobody any more. By the thread that watches."""
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._paused_until = None
        self._listener.close()

    @property
    def is_paused(self) -> bool:
        """Whether the system has given no connection just now."""
        return self._paused_until is not None

    def pause(self, error: OSError) -> None:
        """The system gives no connection: too many files are open, for example. It is asked again later."""
        if str(error) != self._refusal:
            self._refusal = str(error)
            _log.warning("%s cannot make a connection and try it again: %s", self._name, error)
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def look_around(self) -> None:
        """To be called again and again: accept after a pause, and close what does not say who it is."""
        now = time.monotonic()
        if self._paused_until is not None and now > self._paused_until:
            self._paused_until = None
            self.open()
        while self._unknown:
            oldest = self._unknown[0]
            if len(self._unknown) <= self._most_unknown and now - oldest.since <= GREETING_SECONDS:
                return
            oldest.read()  # it may have just said so
            if oldest in self._unknown:
                _log.warning("something connected to %s, said nothing, and was dropped", self._name)
                oldest.turn_away()
                self.forget(oldest)

    def forget(self, caller: Caller) -> None:
        """It has said who it is, or is closed."""
        if caller in self._unknown:
            self._unknown.remove(caller)

    def _accept(self) -> None:
        try:
            for _ in range(_ACCEPT_AT_ONCE):
                stream, _ = self._listener.accept()
                stream.setblocking(False)
                self._unknown.append(self._enter(stream))
        except BlockingIOError:
            return
        except OSError as error:
            self.pause(error)
