"""Waiting until all replicas have come to the same point, however far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable

from colossus.comm.peers import PeerGone, PeerLinks

#: kind of the messages that say that a rank has arrived
ARRIVED = 0x0100
_LOOK_EVERY = 0.5


class Arrivals:
    """A barrier of the ranks that share links, without a time limit as long as the others live: a replica may be many
    steps behind.

    What was sent to a rank before it was told of an arrival is with it then.

    Args:
        while_waiting: called every now and then; raises when it is in vain.
    """

    def __init__(self, links: PeerLinks, while_waiting: Callable[[], None] = lambda: None) -> None:
        self._links, self._while_waiting, self._number = links, while_waiting, 0
        self._came: set[tuple[int, int]] = set()
        #: that this rank has waited here so far
        self.waited_seconds = 0.0

    def wait(self) -> None:
        """All ranks call this as many times.

        Raises:
            PeerGone: one of them has died.
        """
        links, number, began = self._links, self._number, time.monotonic()
        self._number += 1
        others = [index for index in range(links.group.size) if index != links.group.index]
        links.send(others, ARRIVED, number)
        while missing := [index for index in others if (index, number) not in self._came]:
            for index in missing:
                if index in links.gone:
                    raise PeerGone(index, f"{links.name(index)} has gone: {links.gone[index]}")
            links.wait(_LOOK_EVERY, lambda: links.has_come(ARRIVED))
            self._came |= {(message.source, message.number) for message in links.take(ARRIVED)}
            self._while_waiting()
        self._came = {(index, at) for index, at in self._came if at > number}
        self.waited_seconds += time.monotonic() - began
