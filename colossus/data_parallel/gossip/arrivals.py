"""Waiting until all replicas have come to the same point, however far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from colossus.comm.peers import PeerLinks

#: kind of the messages that say that a rank has arrived
ARRIVED = 0x0100
_LOOK_EVERY = 0.5


class Arrivals:
    """A barrier of the ranks that share links, without a time limit as long as the others live: a replica may be many
    steps behind.

    What was sent to a rank before it was told of an arrival is with it then.

    All ranks make theirs at the same time.

    Args:
        watch: told again and again who is missing, nobody at first; raises when it is in vain.
    """

    def __init__(self, links: PeerLinks, watch: Callable[[Sequence[int]], None]) -> None:
        self._links, self._watch, self._number = links, watch, 0
        self._came: set[tuple[int, int]] = set()
        self.wait()  # all have connections then, by which a death is seen

    def wait(self) -> None:
        """All ranks call this as many times.

        Raises:
            RuntimeError: one of them has died.
        """
        links, number, began = self._links, self._number, time.monotonic()
        self._number += 1
        others = [index for index in range(links.group.size) if index != links.group.index]
        links.send(others, ARRIVED, number)
        self._watch([])
        while missing := [index for index in others if (index, number) not in self._came]:
            require_alive(links)
            self._watch(missing)
            links.wait(_LOOK_EVERY, lambda: links.has_come(ARRIVED))
            self._came |= {(message.source, message.number) for message in links.take(ARRIVED)}
        self._came = {(index, at) for index, at in self._came if at > number}
        links.waited_seconds += time.monotonic() - began


def require_alive(links: PeerLinks) -> None:
    """Raises a `RuntimeError` if a peer has died."""
    for index in range(links.group.size):
        if index != links.group.index and (reason := links.lost(index)) is not None:
            if links.has_left(index):
                raise RuntimeError(
                    f"replica {index} has ended before this one: {links.name(index)} has closed its links. It failed, "
                    f"or, in a loop of your own, did not come to a sync point that this one waits in or has before it: "
                    f"all replicas evaluate, save and close as often as each other"
                )
            raise death_of(index, f"{links.name(index)} has gone: {reason}")


def death_of(replica: int, reason: object) -> RuntimeError:
    return RuntimeError(f"replica {replica} has died: {reason}. Start the run again from its last checkpoint")
