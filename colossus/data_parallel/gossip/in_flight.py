"""Messages of gossip between the step that sends them and the one that takes them in."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

from colossus.comm.peers import Message
from colossus.data_parallel.gossip.push_sum import Addend
from colossus.data_parallel.gossip.stop_in_messages import STOP_BYTES, StopInMessages

#: kind of the messages that carry parameters
MIX = 1
_WEIGHT = struct.Struct("<d")


@dataclass(eq=False)
class InFlight:
    """A message that was received or is still awaited: the whole x of its sender, and its push-sum weight.

    Attributes:
        sent, due: numbers of the steps after which it is sent, and taken in.
        share: what the graph gives of it to this replica.
        weight: of the sender; 0 while it travels.
        data: uint8, on the host; None while it travels.
    """

    source: int
    sent: int
    due: int
    share: float
    weight: float = 0.0
    data: Tensor | None = None
    stop: bytes = b""

    def fill(self, received: Message) -> InFlight:
        """It has come."""
        self.data = received.data
        (self.weight,) = _WEIGHT.unpack(received.meta[: _WEIGHT.size])
        self.stop = received.meta[_WEIGHT.size :][:STOP_BYTES]
        return self

    @property
    def name(self) -> str:
        """In checkpoints."""
        return f"in_flight.{self.source}.{self.sent}"

    @property
    def received(self) -> Tensor:
        """The data, once it is here."""
        assert self.data is not None
        return self.data

    @property
    def addend(self) -> Addend:
        return Addend(self.share, self.weight, self.received)


def meta_of(weight: float, stop_in_messages: StopInMessages) -> bytes:
    """What goes beside x."""
    return _WEIGHT.pack(weight) + stop_in_messages.pack()
