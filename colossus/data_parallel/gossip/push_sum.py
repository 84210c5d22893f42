"""Push-sum (1811.10792): a replica mixes x and the weight w, and its model computes with z = x / w."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.peers import Message, PeerLinks
from colossus.data_parallel.parameter_vector import ParameterVector

_EPSILON = 2.0**-52
#: the kind of messages that carry parameters
MIX = 1


@dataclass(eq=False)
class InFlight:
    """A message that is awaited, or received and not mixed in yet: the whole x of its sender, and its weight w.

    Attributes:
        source: the sender's index along data.
        sent: the number of the step after which it is sent.
        due: the number of the step after which it is mixed in.
        share: the weight of the edge from the sender to this replica.
        weight: the sender's w; 0 while the message travels.
        data: the sender's x, uint8, on the host; None while the message travels.
    """

    source: int
    sent: int
    due: int
    share: float
    weight: float = 0.0
    data: Tensor | None = None

    def fill(self, received: Message) -> None:
        """Fill in the message, which has come."""
        self.data = received.data
        self.weight = received.meta

    @property
    def name(self) -> str:
        """The message's name in checkpoints."""
        return f"in_flight.{self.source}.{self.sent}"

    @property
    def received(self) -> Tensor:
        """The data of a message that has come."""
        assert self.data is not None
        return self.data


class PushSum:
    """The x and w of a replica. Where w is 1, x is the parameters themselves; else it is a buffer beside them.

    Args:
        vector: the detached parameters, which also is the layout of x.

    Attributes:
        params: the parameters, z.
        weight: w.
        x: a buffer of ``vector`` on the device; None where w is 1.
    """

    def __init__(self, vector: ParameterVector) -> None:
        self.params, self.vector = vector.tensors, vector
        self.weight = 1.0
        self.x: Tensor | None = None

    @torch.no_grad()
    def take_update(self) -> None:
        """Add the update of z since the last `mix` to x."""
        if self.x is None:
            return
        for x, z in zip(self.vector.views(self.x), self.params, strict=True):
            x.add_(z - x / self.weight)  # the division of `debias`, so that it adds exactly 0 where z did not change

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
        links.send(targets, MIX, step, data, self.weight, dtype=self.vector.dtype, owned=True)

    @torch.no_grad()
    def mix(self, own_share: float, messages: Sequence[InFlight]) -> None:
        """Set x to ``own_share`` x plus the shares of the messages, and w likewise; then set z = x / w."""
        x = self.params if self.x is None else self.vector.parts(self.x)
        if len(messages) == 1 and own_share + messages[0].share == 1.0:  # in one pass
            torch._foreach_lerp_(x, self._operands(messages[0]), messages[0].share)
        else:
            torch._foreach_mul_(x, own_share)
            for message in messages:
                torch._foreach_add_(x, self._operands(message), alpha=message.share)
        weight = own_share * self.weight + sum(message.share * message.weight for message in messages)
        # exactly 1 where it differs from 1 by rounding only
        self.weight = 1.0 if abs(weight - 1.0) <= 2 * (1 + len(messages)) * _EPSILON else weight
        self.debias()

    @torch.no_grad()
    def debias(self) -> None:
        """Set z = x / w."""
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
        """Return x by parameter, and w, with the shares of the messages added; valid until the next `mix`."""
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
        """Restore w and, where it is not 1, x by parameter; z is the parameters as they are."""
        self.weight, self.x = weight, None
        if x is not None:
            self.x = self.vector.empty()
            for view, saved in zip(self.vector.views(self.x), x, strict=True):
                view.copy_(saved)

    def _operands(self, message: InFlight) -> list[Tensor]:
        """Return the data of a message in the form of x: by parameter where w is 1, else in parts."""
        if self.x is None:
            return self.vector.views(self.vector.on_device(message.received))
        return self._parts(message)

    def _parts(self, message: InFlight) -> list[Tensor]:
        return self.vector.parts(self.vector.on_device(message.received))
