"""x and w of push-sum (1811.10792): what a replica mixes, beside the z = x / w that its model computes with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.peers import Message, PeerLinks
from colossus.data_parallel.parameter_vector import ParameterVector

_EPSILON = 2.0**-52
#: kind of the messages that carry parameters
MIX = 1
#: w, which travels beside x
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

    def fill(self, received: Message) -> None:
        """It has come."""
        self.data = received.data
        (self.weight,) = _WEIGHT.unpack(received.meta)

    @property
    def name(self) -> str:
        """In checkpoints."""
        return f"in_flight.{self.source}.{self.sent}"

    @property
    def received(self) -> Tensor:
        """The data, once it is here."""
        assert self.data is not None
        return self.data


class PushSum:
    """Of a replica. Where w is 1, x is the parameters themselves, and is mixed where it lies; else it is kept beside
    them. What an update adds to z is added to x as it is.

    Args:
        vector: of the parameters, detached: how x is packed.

    Attributes:
        weight: w.
        x: where w is not 1, bytes of ``vector`` on the device; else None.
    """

    def __init__(self, vector: ParameterVector) -> None:
        self.params, self.vector = vector.tensors, vector
        self.weight = 1.0
        self.x: Tensor | None = None

    @torch.no_grad()
    def take_update(self) -> None:
        """Add to x what an update has added to z since `mix`."""
        if self.x is None:
            return
        for x, z in zip(self.vector.views(self.x), self.params, strict=True):
            x.add_(z - x / self.weight)  # as `debias` divides: 0 where nothing was added to z

    @torch.no_grad()
    def send(self, links: PeerLinks, targets: list[int], step: int) -> None:
        """Send x and w to these replicas."""
        if not targets:
            return
        data = links.buffer(self.vector.nbytes)
        if self.x is None:
            self.vector.pack(data)
        else:
            data.copy_(self.x)
        links.send(targets, MIX, step, data, _WEIGHT.pack(self.weight), dtype=self.vector.dtype, owned=True)

    @torch.no_grad()
    def mix(self, kept: float, messages: Sequence[InFlight]) -> None:
        """X <- kept x + the others' shares, w likewise; then z = x / w."""
        x = self.params if self.x is None else self.vector.parts(self.x)
        if len(messages) == 1 and kept + messages[0].share == 1.0:  # in one pass
            torch._foreach_lerp_(x, self._operands(messages[0]), messages[0].share)
        else:
            torch._foreach_mul_(x, kept)
            for message in messages:
                torch._foreach_add_(x, self._operands(message), alpha=message.share)
        weight = kept * self.weight + sum(message.share * message.weight for message in messages)
        # 1 where it is 1 but for rounding
        self.weight = 1.0 if abs(weight - 1.0) <= 2 * (1 + len(messages)) * _EPSILON else weight
        self.debias()

    @torch.no_grad()
    def debias(self) -> None:
        """Z = x / w."""
        if self.x is None:
            if self.weight == 1.0:
                return
            self.x = self.vector.empty()
            self.vector.pack(self.x)
        if self.weight == 1.0:
            self.vector.unpack(self.x)
            self.x = None
            return
        for x, z in zip(self.vector.views(self.x), self.params, strict=True):
            torch.div(x, self.weight, out=z)

    @torch.no_grad()
    def total(self, messages: Sequence[InFlight]) -> tuple[list[Tensor], float]:
        """X by parameter and w, with what is added to them, which changes nothing. Of no use after the next `mix`."""
        if self.x is None and not messages:
            return self.params, self.weight
        total = self.vector.empty()
        if self.x is None:
            self.vector.pack(total)
        else:
            total.copy_(self.x)
        for message in messages:
            torch._foreach_add_(self.vector.parts(total), self._parts(message), alpha=message.share)
        return self.vector.views(total), self.weight + sum(message.share * message.weight for message in messages)

    @torch.no_grad()
    def restore(self, weight: float, x: Sequence[Tensor] | None) -> None:
        """Take back w and, where it is not 1, x by parameter; z is what the parameters are."""
        self.weight, self.x = weight, None
        if x is not None:
            self.x = self.vector.empty()
            for view, saved in zip(self.vector.views(self.x), x, strict=True):
                view.copy_(saved)

    def _operands(self, message: InFlight) -> list[Tensor]:
        """What came as x lies: by parameter where w is 1, else in parts."""
        if self.x is None:
            return self.vector.views(self.vector.on_device(message.received))
        return self._parts(message)

    def _parts(self, message: InFlight) -> list[Tensor]:
        return self.vector.parts(self.vector.on_device(message.received))
