"""x and w of push-sum (1811.10792): what a replica mixes, beside the z = x / w that its model computes with; and the
messages of gossip: x of their sender, its w, and requests to stop."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.peers import Message
from colossus.data_parallel.parameter_vector import ParameterVector

_EPSILON = 2.0**-52
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


class PushSum:
    """Of a replica. Where w is 1, x is the parameters themselves, and is mixed where it lies; else it is kept beside
    them. What an update adds to z is added to x as it is.

    Args:
        params: the trainable parameters as they are stored, detached.

    Attributes:
        weight: w.
        vector: how x is packed.
        x: where w is not 1, bytes of ``vector`` on the device; else None.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self.vector = list(params), ParameterVector(params)
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
    def write(self, data: Tensor) -> None:
        """Copy x to ``data``, uint8 [``vector.nbytes``] on the host."""
        if self.x is None:
            self.vector.pack(data)
        else:
            data.copy_(self.x)

    @torch.no_grad()
    def mix(self, kept: float, messages: Sequence[InFlight]) -> None:
        """x <- kept x + the others' shares, w likewise; then z = x / w."""
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
        """z = x / w."""
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
        """x by parameter and w, with what is added to them, which changes nothing. Of no use after the next `mix`."""
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
