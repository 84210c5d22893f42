"""Several nodes: where their launchers meet, and what they tell each other through the rendezvous' store.

A node that ends for any reason but success ends the others within seconds, and each of them can say why.
"""

from __future__ import annotations

import contextlib
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
from colossus.launch.outcome import NodeEnd
from colossus.launch.rendezvous import Rendezvous
from colossus.launch.stop import GRACE_SECONDS

BEAT_SECONDS = 0.5
"""Between two signs of life, and between two looks at those of the others."""

SILENCE_SECONDS = 30.0
"""Without a sign of life a node is gone. (A launcher that was suspended gives none, and its ranks go on.)"""

SILENCE_AFTER_END_SECONDS = 8.0
"""The same when the ranks here have ended already."""

END_SECONDS = GRACE_SECONDS + 8.0
"""How long a node whose ranks have failed or were stopped waits for those that live to say how theirs ended."""

FAREWELL_SECONDS = 2.0
"""How long the node that holds the store stays for the others to read how it ended."""


_END = TypeAdapter(NodeEnd)


class Nodes:
    """All nodes of one attempt, which have met when this is made; from `watch` on a thread looks after the others.

    Nodes that were there in the attempt before come first, in their order: so the first knows what was, and ranks stay
    on their hosts. Those beyond the ones that the plan needs have no ranks (`share`), and wait.

    Args:
        rendezvous: where they meet.
        before: number of this node in the attempt before, None of one that comes now.

    Attributes:
        node: number of this one.
        num_nodes: that have ranks.
        ends: of the other nodes that have told theirs, by number.
        address: at which the others reach this one.

    Raises:
        RuntimeError: when they do not meet (elastic's RendezvousError).
    """

    def __init__(self, rendezvous: Rendezvous, before: int | None = None) -> None:
        self._store, self.node, self.num_present = rendezvous.meet()
        self._rendezvous, self.num_nodes, self._local_ranks = rendezvous, self.num_present, 0
        self.ends: dict[int, NodeEnd] = {}
        self._has_store, self._silence = True, SILENCE_SECONDS
        self._beats: dict[int, bytes] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="colossus-nodes", daemon=True)
        # from here this machine reaches the endpoint: the loopback, where the endpoint is here and its name means that
        endpoint = urlsplit(f"//{rendezvous.endpoint}").hostname or ""
        guess = machine.address_towards(endpoint) or "127.0.0.1"
        known = self.exchange("node", {"host": socket.gethostname(), "address": guess, "before": before})
        order = sorted(range(self.num_present), key=lambda place: _seniority(known[place]["before"], place))
        self.node, self._hosts = order.index(self.node), [known[place]["host"] for place in order]
        self._others = [other for other in range(self.num_present) if other != self.node]
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self.address = machine.address_among(guess, [each["address"] for each in known])
        # by itself gloo takes the address that the machine's own name has, which others may not be able to reach
        if (interface := machine.interface_of(self.address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def share(self, num_nodes: int, local_ranks: int) -> range:
        """The ranks of this node: none where so many nodes are enough without it."""
        self.num_nodes, self._local_ranks = num_nodes, local_ranks
        return self._ranks_of(self.node)

    def _ranks_of(self, node: int) -> range:
        return range(node * self._local_ranks, (node + 1) * self._local_ranks) if node < self.num_nodes else range(0)

    def num_newcomers(self) -> int:
        """Nodes that wait for the next attempt. For one node to ask."""
        return self._rendezvous.num_newcomers()

    @property
    def has_ended(self) -> bool:
        """Whether all other nodes that have ranks have said how theirs ended."""
        return all(other in self.ends for other in self._others if other < self.num_nodes)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The value of each node, by number. All nodes at once."""
        self._store.set(f"colossus/{what}/{self.node}", json.dumps(value))
        keys = [f"colossus/{what}/{node}" for node in range(self.num_present)]
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """The value that the first node makes; ``make`` is called there alone."""
        if self.node == 0:
            self._store.set(f"colossus/{what}", json.dumps(make()))
        return json.loads(self._store.get(f"colossus/{what}"))

    def watch(self) -> None:
        """Begin to give signs of life, and to look for those of the others."""
        if self._thread.ident is None:
            self._heard = dict.fromkeys(self._others, time.monotonic())
            self._thread.start()

    def has_trouble(self, *, but_stops: bool = False) -> bool:
        """Whether another node has failed, was stopped or is gone: the ranks here are to end, too.

        Args:
            but_stops: leave out a stop by a signal, of which the ranks here know from theirs.
        """
        ends = [end for end in tuple(self.ends.values()) if not (but_stops and end.signum is not None)]
        return any(not end.is_good for end in ends) or bool(self.gone())

    def gone(self) -> list[str]:
        """The nodes that give no sign of life and have not said how they ended, in words."""
        return [self._describe(other) for other in self._others if self._is_silent(other)]

    def _describe(self, node: int) -> str:
        ranks = self._ranks_of(node)
        return f"node {node} (host {self._hosts[node]}; {named_ranks(ranks) if ranks else 'no ranks'})"

    def _is_silent(self, other: int) -> bool:
        is_late = time.monotonic() - self._heard[other] > self._silence
        return other not in self.ends and (is_late or not self._has_store)

    def conclude(self, end: NodeEnd) -> None:
        """Tell the others how this node ended, and wait for theirs: after a good end as long as they live.

        Raises:
            BaseException: what a signal handler raises meanwhile. It may be called again then.
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
        """Say goodbye, and when this process holds the store, wait until all have."""
        self._closing.set()
        self._thread.join(2 * BEAT_SECONDS)
        if not self._has_store or self._thread.is_alive():
            return
        goodbyes, deadline = [f"colossus/goodbye/{other}" for other in self.ends], time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(RuntimeError):
            self._store.set(f"colossus/goodbye/{self.node}", "")
            while self._rendezvous.holds_store and not self._store.check(goodbyes) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _watch(self) -> None:
        """Give a sign of life and take those of the others, until the store is gone."""
        number = num_ends = 0
        alive = [f"colossus/alive/{other}" for other in self._others]
        try:
            while not self._closing.is_set():
                number += 1
                self._store.set(f"colossus/alive/{self.node}", str(number))
                if self._store.check(alive):
                    for other, beat in zip(self._others, self._store.multi_get(alive), strict=True):
                        if self._beats.get(other) != beat:
                            self._beats[other], self._heard[other] = beat, time.monotonic()
                if (number_now := self._store.add("colossus/ends", 0)) != num_ends:
                    num_ends = number_now
                    for other in self._others:
                        key = f"colossus/end/{other}"
                        if self._store.check([key]):
                            self.ends[other] = _END.validate_json(self._store.get(key))
                self._closing.wait(BEAT_SECONDS)
        except RuntimeError:  # its launcher has gone, and it with it
            self._has_store = False


def _seniority(before: int | None, place: int) -> tuple[bool, int, int]:
    return before is None, before or 0, place
