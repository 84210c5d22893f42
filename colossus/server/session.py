"""What a server knows of one client: which of its requests were taken, and the replies until they have come.

A request is (worker, incarnation of the client, sequence), with sequences from 1 on, without gaps, in the order of the
calls. A client that has lost its connection sends again what has no reply; what was taken before is not taken again,
but its reply is sent again if there is one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from colossus.comm.peer_wire import WireError
from colossus.server.connection import Connection
from colossus.server.outgoing import Outgoing
from colossus.server.segments import SegmentMap, SegmentPool
from colossus.server.wire import Hello

#: requests of one client without a reply; ours keep to less
_MOST_OPEN = 1 << 12


class Session:
    """One client.

    Attributes:
        connection: None while there is none, since ``lost_at``.
        segments: where replies are written to.
        mapped: the client's segments.
        takes_segments: whether the client does.
        is_over: nothing is sent any more.
    """

    def __init__(self, hello: Hello) -> None:
        self.worker, self.incarnation = hello.worker, hello.incarnation
        self.connection: Connection | None = None
        self.lost_at = time.monotonic()
        self.takes_segments = hello.takes_segments
        self.segments, self.mapped = SegmentPool(), SegmentMap()
        self.can_map = True
        self.is_over = False
        self._lock = threading.RLock()
        self._last = 0
        #: taken, and not answered
        self._open: set[int] = set()
        #: answered, and not acknowledged
        self._answers: dict[int, Outgoing] = {}

    def connect(self, connection: Connection, takes_segments: bool) -> None:
        """The client has come (back)."""
        with self._lock:
            self.connection, self.takes_segments = connection, takes_segments

    def disconnect(self) -> None:
        with self._lock:
            self.connection, self.lost_at = None, time.monotonic()

    def take(self, sequence: int) -> bool:
        """Whether a request is new. One that was answered is answered again.

        Raises:
            WireError: requests are missing before it, or there are too many.
        """
        with self._lock:
            if sequence <= self._last:
                if (answer := self._answers.get(sequence)) is not None:
                    self._send(answer)
                return False
            if sequence != self._last + 1:
                raise WireError(f"request {sequence} after request {self._last}")
            if len(self._open) >= _MOST_OPEN:
                raise WireError(f"more than {_MOST_OPEN} requests under way")
            self._last = sequence
            self._open.add(sequence)
            return True

    def answer(self, sequence: int, make: Callable[[SegmentPool | None], Outgoing]) -> None:
        """The reply to a request. From any thread.

        Args:
            make: makes it, with arrays in segments where these are given.
        """
        answer = make(self.segments if self.takes_segments else None)
        answer.sequence = sequence
        with self._lock:
            if self.is_over:
                answer.release()
                return
            self._open.discard(sequence)
            self._answers[sequence] = answer
            self._send(answer)

    def _send(self, answer: Outgoing) -> None:
        if self.connection is not None:
            answer.send(self.connection, self.takes_segments)
            self.connection.forget(self.segments.take_dropped())

    def acknowledge(self, sequences: object) -> None:
        """The client has these replies. Raises `WireError` for what is no list of numbers."""
        for sequence in _numbers(sequences):
            with self._lock:
                answer = self._answers.pop(sequence, None)
            if answer is not None:
                answer.release()

    def resume(self, missing: object) -> None:
        """The client is back, and has all replies but these. Raises `WireError` for what is no list of numbers."""
        kept = set(_numbers(missing))
        with self._lock:
            self.acknowledge([sequence for sequence in self._answers if sequence not in kept])

    def end(self) -> None:
        """The client is gone, and will not come back. By the thread that reads."""
        with self._lock:
            self.is_over = True
            self.connection = None
            self._answers.clear()
        self.segments.close()
        self.mapped.close()


def _numbers(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise WireError("what should be a list of sequences is none")
    return value
