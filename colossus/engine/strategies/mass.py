"""Whose push-sum weight is whose, so that after a death it is known what is left among those that live."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from colossus.engine.strategies.in_flight import InFlight


class Mass:
    """What one replica brings to the push-sum weight of those that live, in flight between them included.

    Among the living nothing is lost: their sum is what they began with, less what they have given to the dead, and
    what they have got of the dead. So each counts what went between it and every other, and its own is that sum's
    addend; where a message between two that live is does not matter.

    Attributes:
        own: this replica's addend.
    """

    def __init__(self) -> None:
        self.restart(1.0, ())

    def restart(self, weight: float, in_flight: Iterable[InFlight]) -> None:
        """This replica begins with a weight, and with what is in flight to it."""
        self.own = weight
        #: by other replica: what was got of it less what was given to it
        self._balance: defaultdict[int, float] = defaultdict(float)
        #: to whom how much is sent that has not been taken off the replica's weight yet
        self._sending: dict[int, float] = {}
        for message in in_flight:
            share = message.share * message.weight
            self.own += share
            self._balance[message.source] -= share  # which it gets once more when it is taken in

    def sends(self, weight: float, targets: Sequence[tuple[int, float]]) -> None:
        """Shares of this weight go to these."""
        self._sending = {to: share * weight for to, share in targets}
        for to, given in self._sending.items():
            self._balance[to] -= given

    def mixes(self, taken: Iterable[InFlight]) -> None:
        """What was sent last is taken off, and these messages are taken in."""
        self._sending = {}
        for message in taken:
            self._balance[message.source] += message.share * message.weight

    def lose(self, dead: Iterable[int], last: Iterable[InFlight]) -> float:
        """Others have died. What was sent to them but not taken off yet is kept.

        Args:
            last: their messages in flight that will be taken in.

        Returns:
            This replica's addend of the weight of those that live.
        """
        for index in dead:
            self.own += self._balance.pop(index, 0.0) + self._sending.pop(index, 0.0)
        self.own += sum(message.share * message.weight for message in last)
        return self.own

    def rescale(self, scale: float) -> None:
        """All that live multiply their weights by this."""
        self.own *= scale
        for counts in (self._balance, self._sending):
            for index in counts:
                counts[index] *= scale
