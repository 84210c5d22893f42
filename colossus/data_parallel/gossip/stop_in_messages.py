"""A request to stop that travels with the messages of gossip: all replicas stop after the same step, and none waits."""

from __future__ import annotations

import struct

_STOP = struct.Struct("<qd")  # the step after which to stop, -1 for none; the requests
STOP_BYTES = _STOP.size


class StopInMessages:
    """What a replica knows of a stop.

    A replica that requests one names a step by which all will have heard of it, and every message carries the earliest
    step that its sender knows of. The request with the earliest step wins: by then everyone has heard of it.

    Args:
        lead: steps after which a word of any replica, in any step, has reached all others.
    """

    def __init__(self, lead: int) -> None:
        self._lead = lead
        self._step: int | None = None
        self._requests = 0.0
        #: stops up to this step are of requests before the last stop, which messages may still carry
        self._settled = -1

    def pack(self) -> bytes:
        """For a message, `STOP_BYTES` long."""
        return _STOP.pack(-1 if self._step is None else self._step, self._requests)

    def hear(self, raw: bytes, step: int) -> None:
        """What came with a message that is taken in after step ``step``. Wishes before the last stop are no news."""
        stop, requests = _STOP.unpack(raw)
        if stop >= step and stop > self._settled:
            self._note(stop, requests)

    def request(self, step: int, requests: float, *, is_known_to_all: bool = False) -> None:
        """Request a stop in step ``step``: after it, if all replicas hear of it in this very step."""
        if requests:
            self._note(step if is_known_to_all else step + self._lead, requests)

    def due(self, step: int) -> float:
        """The requests by which all stop after step ``step``, 0 where they do not; then they are forgotten."""
        if self._step is None or self._step > step:
            return 0.0
        requests, self._settled = self._requests, step + self._lead
        self.forget()
        return requests

    def forget(self) -> None:
        """That there was any request."""
        self._step, self._requests = None, 0.0

    def restart(self) -> None:
        """Steps are made again, with messages that carry no requests."""
        self.forget()
        self._settled = -1

    def _note(self, stop: int, requests: float) -> None:
        if self._step is None or stop < self._step:
            self._step, self._requests = stop, requests
        elif stop == self._step:
            self._requests = max(self._requests, requests)
