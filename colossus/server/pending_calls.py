"""The calls of a client that have no reply: kept as they were sent, to be sent again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from colossus.server import wire
from colossus.server.connection import Connection
from colossus.server.messages import Call, ServerGone
from colossus.server.outgoing import Outgoing

#: calls under way, and bytes of them that are held for the socket; then the next one waits
_MOST_CALLS = 256
_MOST_HELD_BYTES = 256 << 20


@dataclass(eq=False)
class Pending:
    """A call, the message that is its request, and where its arrays go."""

    call: Call
    message: Outgoing
    into: Sequence[Tensor] | None


class PendingCalls:
    """By sequence, in the order of the calls.

    Attributes:
        changed: its lock guards what is here, and is told of each call that ends.
        gone: the end of the server: nothing is pending any more.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.gone: ServerGone | None = None
        self._calls: dict[int, Pending] = {}
        self._last = 0
        self._held_bytes = 0

    def wait_for_room(self) -> None:
        """Return when there is room for one more, or none is sent any more."""
        with self.changed:
            self.changed.wait_for(lambda: self._has_room() or self.gone is not None)

    def wait_for_end(self, seconds: float | None) -> None:
        """Return when all have ended, or after ``seconds``."""
        with self.changed:
            self.changed.wait_for(lambda: not self._calls, seconds)

    def _has_room(self) -> bool:
        return len(self._calls) < _MOST_CALLS and self._held_bytes < _MOST_HELD_BYTES

    def add(self, pending: Pending) -> None:
        """The next in order: its message gets the next sequence."""
        self._last += 1
        pending.message.sequence = self._last
        self._held_bytes += pending.message.held_bytes
        self._calls[self._last] = pending

    def get(self, sequence: int) -> Pending | None:
        """None where it has ended, or never was."""
        return self._calls.get(sequence)

    def into_of(self, sequence: int) -> Sequence[Tensor] | None:
        pending = self._calls.get(sequence)
        return None if pending is None else pending.into

    def remove(self, sequence: int) -> None:
        """It has its reply."""
        with self.changed:
            self._held_bytes -= self._calls.pop(sequence).message.held_bytes
            self.changed.notify_all()

    def resume(self, connection: Connection, takes_segments: bool) -> None:
        """Send all again, after saying which they are."""
        connection.send(wire.frame(wire.RESUME, wire.encode(list(self._calls))))
        for pending in self._calls.values():
            pending.message.send(connection, takes_segments)

    def lose(self, gone: ServerGone) -> None:
        """None will have a reply."""
        with self.changed:
            self.gone = gone
            lost = list(self._calls.values())
            self._calls.clear()
            self.changed.notify_all()
        for pending in lost:
            pending.call.finish(None, gone)
