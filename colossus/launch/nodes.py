"""The nodes of a run, whose launchers communicate through the store of the rendezvous.

A node that ends for any reason but success ends the others within seconds, and each of them can report the reason.

Of torch's elastic only the rendezvous is used, not its agent. That agent decides for its own node: it counts its own
restarts, never learns how ranks of other nodes ended, and so neither names a culprit there nor knows an error again. It
stops ranks by SIGTERM and, 30 s later, by force, however long the save of their step takes. It knows no plan that needs
fewer nodes than are there, and waits for a node that has gone in its exit barrier. The exchange of ends, the heartbeats
and `Nodes.share` would remain beside it, which are this file.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from colossus import machine
from colossus.arithmetic import named_ranks
from colossus.launch.ends import GRACE_SECONDS, NodeEnd
from colossus.launch.rendezvous import Rendezvous

#: the interval of heartbeats, and of looks at those of the other nodes
BEAT_SECONDS = 0.5

#: the silence after which a node counts as gone. (A suspended launcher is silent, and its ranks go on.)
SILENCE_SECONDS = 30.0

#: the same when the ranks of this node have ended already
SILENCE_AFTER_END_SECONDS = 8.0

#: the longest wait of a node, whose ranks have failed or were stopped, for the ends of the other live nodes
END_SECONDS = GRACE_SECONDS + 8.0


_END = TypeAdapter(NodeEnd)


class Nodes:
    """All nodes of one attempt, which the constructor waits for; after `watch` a thread watches the other nodes.

    Nodes of the attempt before come first, in their order, so that the first one has the history and ranks stay on
    their hosts. Nodes that the plan does not need have no ranks (`share`), and wait.

    Args:
        rendezvous: the rendezvous of this launcher.
        before: the number of this node in the attempt before; None for a new node.

    Attributes:
        node: the number of this node.
        num_present: the number of nodes.
        num_nodes: the number of nodes that have ranks.
        ends: number of another node -> its end, once it has reported it.
        address: the address at which other nodes reach this one.

    Raises:
        RuntimeError: the nodes do not meet (elastic's RendezvousError).
    """

    def __init__(self, rendezvous: Rendezvous, before: int | None = None) -> None:
        self._store, self.node, self.num_present = rendezvous.join()
        self._rendezvous, self.num_nodes, self._local_ranks = rendezvous, self.num_present, 0
        self.ends: dict[int, NodeEnd] = {}
        self._has_store, self._silence = True, SILENCE_SECONDS
        self._beats: dict[int, bytes] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="colossus-nodes", daemon=True)
        # the address from which this machine reaches the endpoint, which is the loopback where it is the endpoint
        endpoint = urlsplit(f"//{rendezvous.endpoint}").hostname or ""
        guess = machine.address_towards(endpoint) or "127.0.0.1"
        facts = self.exchange("node", {"host": socket.gethostname(), "address": guess, "before": before})
        order = sorted(range(self.num_present), key=lambda place: _seniority(facts[place]["before"], place))
        self.node, self._hosts = order.index(self.node), [facts[place]["host"] for place in order]
        self._others = [other for other in range(self.num_present) if other != self.node]
        self._beat_times = dict.fromkeys(self._others, time.monotonic())
        self.address = machine.address_among(guess, [fact["address"] for fact in facts])
        # by default gloo takes the address of the machine's own name, which others may not be able to reach
        if (interface := machine.interface_of(self.address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def share(self, num_nodes: int, local_ranks: int) -> range:
        """Return the ranks of this node; none where the plan's ``num_nodes`` nodes are complete without it."""
        self.num_nodes, self._local_ranks = num_nodes, local_ranks
        return self._ranks_of(self.node)

    def _ranks_of(self, node: int) -> range:
        return range(node * self._local_ranks, (node + 1) * self._local_ranks) if node < self.num_nodes else range(0)

    def num_newcomers(self) -> int:
        """Return the number of nodes that wait for the next attempt; one node calls this for all."""
        return self._rendezvous.num_newcomers()

    @property
    def has_ended(self) -> bool:
        """Return whether all other nodes with ranks have reported their end."""
        return all(other in self.ends for other in self._others if other < self.num_nodes)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Return the value of each node, by number. All nodes call this at the same time."""
        self._store.set(f"colossus/{what}/{self.node}", json.dumps(value))
        keys = [f"colossus/{what}/{node}" for node in range(self.num_present)]
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """Return the value that ``make`` returns on the first node, where alone it is called."""
        if self.node == 0:
            self._store.set(f"colossus/{what}", json.dumps(make()))
        return json.loads(self._store.get(f"colossus/{what}"))

    def watch(self) -> None:
        """Begin to send heartbeats, and to look for those of the other nodes."""
        if self._thread.ident is None:
            self._beat_times = dict.fromkeys(self._others, time.monotonic())
            self._thread.start()

    def has_trouble(self, *, but_stops: bool = False) -> bool:
        """Return whether another node has failed, was stopped or is gone, so that the ranks here must end, too.

        Args:
            but_stops: ignore a stop by a signal, which the ranks here get from their peers.
        """
        ends = [end for end in tuple(self.ends.values()) if not (but_stops and end.signum is not None)]
        return any(not end.is_good for end in ends) or bool(self.gone())

    def gone(self) -> dict[int, str]:
        """Return, with a text on each, the nodes that are silent and have not reported their end."""
        return {other: self._describe(other) for other in self._others if self._is_silent(other)}

    def _describe(self, node: int) -> str:
        ranks = self._ranks_of(node)
        return f"node {node} (host {self._hosts[node]}; {named_ranks(ranks) if ranks else 'no ranks'})"

    def _is_silent(self, other: int) -> bool:
        is_late = time.monotonic() - self._beat_times[other] > self._silence
        return other not in self.ends and (is_late or not self._has_store)

    def conclude(self, end: NodeEnd) -> None:
        """Report the end of this node, and wait for the ends of the others; after a good end, as long as they live.

        Raises:
            BaseException: an error of a signal handler that runs meanwhile; this may be called again afterwards.
        """
        self.watch()
        try:
            self._store.set(f"colossus/end/{self.node}", _END.dump_json(end).decode())
            self._store.add("colossus/ends", 1)
        except RuntimeError:
            self._has_store = False
        trouble_since = math.inf
        self._silence = SILENCE_AFTER_END_SECONDS
        while any(other not in self.ends and not self._is_silent(other) for other in self._others):
            if not end.is_good or self.has_trouble():
                trouble_since = min(trouble_since, time.monotonic())
            if time.monotonic() - trouble_since > END_SECONDS:
                break
            time.sleep(0.02)

    def close(self) -> None:
        """Stop the heartbeats, and name to the rendezvous the nodes that lived at the end, whose goodbyes it awaits."""
        self._closing.set()
        self._thread.join(2 * BEAT_SECONDS)
        if self._has_store and not self._thread.is_alive():
            self._rendezvous.peers = (self.node, tuple(self.ends))

    def _watch(self) -> None:
        """Send heartbeats, and read those and the ends of the other nodes, until the store is gone."""
        number = num_ends = 0
        alive = [f"colossus/alive/{other}" for other in self._others]
        try:
            while not self._closing.is_set():
                number += 1
                self._store.set(f"colossus/alive/{self.node}", str(number))
                if self._store.check(alive):
                    for other, beat in zip(self._others, self._store.multi_get(alive), strict=True):
                        if self._beats.get(other) != beat:
                            self._beats[other], self._beat_times[other] = beat, time.monotonic()
                if (number_now := self._store.add("colossus/ends", 0)) != num_ends:
                    num_ends = number_now
                    for other in self._others:
                        key = f"colossus/end/{other}"
                        if self._store.check([key]):
                            self.ends[other] = _END.validate_json(self._store.get(key))
                self._closing.wait(BEAT_SECONDS)
        except RuntimeError:  # the launcher with the store has gone
            self._has_store = False


def _seniority(before: int | None, place: int) -> tuple[bool, int, int]:
    return before is None, before or 0, place
