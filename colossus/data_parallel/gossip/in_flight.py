"""The messages of gossip: the parameters of their sender, its push-sum weight, and requests to stop."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

from colossus.comm.peers import Message

#: kind of the messages that carry parameters
MIX = 1
_WEIGHT = struct.Struct("<d")
#: the step after which a stop was requested, that after which all stop (-1: none), the requests
_STOP = struct.Struct("<qqd")


@dataclass(eq=False)
class InFlight:
    """A message that was received or is still awaited: the whole x of its sender, and its push-sum weight.

    Attributes:
        sent, due: numbers of the steps after which it is sent, and taken in.
        share: what the graph gives of it to this replica.
        weight: of the sender; 0 while it travels.
        data: uint8, on the host; None while it travels.
        stop: what its sender knows of a stop; empty where it comes from a checkpoint.
    """

    source: int
    sent: int
    due: int
    share: float
    weight: float = 0.0
    data: Tensor | None = None
    stop: bytes = b""

    def fill(self, received: Message) -> None:
        """It has come."""
        self.data = received.data
        (self.weight,) = _WEIGHT.unpack(received.meta[: _WEIGHT.size])
        self.stop = received.meta[_WEIGHT.size :]

    @property
    def name(self) -> str:
        """In checkpoints."""
        return f"in_flight.{self.source}.{self.sent}"

    @property
    def received(self) -> Tensor:
        """The data, once it is here."""
        assert self.data is not None
        return self.data


class StopRequest:
    """A request to stop that travels with the messages: all replicas stop after the same step, and none waits for it.

    A replica that requests one names a step after which all will have heard of it, and every message carries the
    earliest such step that its sender knows of. The request with the earliest step wins: by then everyone has heard of
    it. Messages may still carry others that were made before that stop; they are forgotten.
    """

    def __init__(self) -> None:
        self._requested = self._stop = self._last_stop = -1
        self._requests = 0.0

    def meta(self, weight: float) -> bytes:
        """What goes beside x, with its push-sum weight."""
        return _WEIGHT.pack(weight) + _STOP.pack(self._requested, self._stop, self._requests)

    def hear(self, raw: bytes) -> None:
        """What came with a message."""
        if raw:
            self.request(*_STOP.unpack(raw))

    def request(self, requested: int, stop: int, requests: float) -> None:
        """Requests made after step ``requested``, of which all know after step ``stop``."""
        if stop < 0 or requested <= self._last_stop:
            return
        if self._stop < 0 or stop < self._stop:
            self._requested, self._stop, self._requests = requested, stop, requests
        elif stop == self._stop:
            self._requests = max(self._requests, requests)

    def due(self, step: int) -> float:
        """The requests by which all stop after step ``step``, 0 where they do not; then they are forgotten."""
        if self._stop < 0 or self._stop > step:
            return 0.0
        requests = self._requests
        self.__init__()  # type: ignore[misc]
        self._last_stop = step
        return requests
