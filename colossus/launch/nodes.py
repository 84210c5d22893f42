"""Several nodes: where their launchers meet, and what they tell each other through the rendezvous' store.

A node that ends for any reason but success ends the others within seconds, and each of them can say why.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from colossus import machine
from colossus.launch.outcome import NodeEnd
from colossus.launch.stop import GRACE_SECONDS

MEET_SECONDS = 15.0
"""How long the others may take to come before the user hears that they are waited for."""

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


# -- where they meet ------------------------------------------------------------------------------------------


def announce_waiting(endpoint: str, nodes: int) -> Timer:
    """Says that nodes are waited for, unless it is cancelled in time."""

    def say() -> None:
        print(f"colossus: waiting at {endpoint} until all {nodes} nodes are there", file=sys.stderr, flush=True)

    timer = Timer(MEET_SECONDS, say)
    timer.daemon = True
    timer.start()
    return timer


def meet(endpoint: str, nodes: int) -> tuple[RendezvousHandler, bool]:
    """The rendezvous, and whether this process holds its store: the first that can listen there does."""
    for holds_store in (True, False) if _is_here(endpoint) else (False,):
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=endpoint,
            run_id="colossus",
            min_nodes=nodes,
            max_nodes=nodes,
            local_addr="127.0.0.1" if nodes == 1 else None,
            is_host=holds_store,
        )
        try:
            return get_rendezvous_handler(parameters), holds_store
        except RendezvousConnectionError:
            if not holds_store:
                raise
    raise AssertionError("a rendezvous is made or it raises")


def _is_here(endpoint: str) -> bool:
    """Whether the endpoint's host is this machine: then one can listen at its address."""
    try:
        host = urlsplit(f"//{endpoint}").hostname
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except (OSError, ValueError):
        return False
    return True


# -- what they tell each other --------------------------------------------------------------------------------


class Nodes:
    """The other nodes, all of which have met already; from `watch` on a thread looks after them.

    Args:
        store: of the rendezvous; one of the nodes holds it.
        node: number of this one.
        ranks: of this one.
        endpoint: where the nodes have met.

    Attributes:
        ends: of the other nodes that have told theirs, by number.
        address: at which the others reach this one.
    """

    def __init__(self, store: Any, node: int, num_nodes: int, ranks: Sequence[int], endpoint: str) -> None:
        self._store, self.node, self.num_nodes = store, node, num_nodes
        self.ends: dict[int, NodeEnd] = {}
        self._others = [other for other in range(num_nodes) if other != node]
        self._has_store, self._silence = True, SILENCE_SECONDS
        self._beats: dict[int, bytes] = {}
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._closing = threading.Event()
        # from here this machine reaches the endpoint: the loopback, where the endpoint is here and its name means that
        guess = machine.address_towards(urlsplit(f"//{endpoint}").hostname or "") or "127.0.0.1"
        self._introductions = self.exchange(
            "node", {"host": socket.gethostname(), "ranks": list(ranks), "address": guess}
        )
        self.address = machine.address_among(guess, [each["address"] for each in self._introductions])
        self._thread = threading.Thread(target=self._watch, name="colossus-nodes", daemon=True)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The value of each node, by number. All nodes at once."""
        self._store.set(f"colossus/{what}/{self.node}", json.dumps(value))
        keys = [f"colossus/{what}/{node}" for node in range(self.num_nodes)]
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """The value that the first node makes; ``make`` is called there alone."""
        if self.node == 0:
            self._store.set(f"colossus/{what}", json.dumps(make()))
        return json.loads(self._store.get(f"colossus/{what}"))

    def use_interface(self) -> None:
        """Have gloo, on the ranks to be started, use the interface of `address`, unless the user has chosen one.

        By itself it takes the address that the machine's own name has, which may be one that the others cannot reach.
        """
        interface = machine.interface_of(self.address)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def watch(self) -> None:
        """Begin to give signs of life, and to look for those of the others."""
        if self._thread.ident is None:
            self._heard = dict.fromkeys(self._others, time.monotonic())
            self._thread.start()

    def has_trouble(self) -> bool:
        """Whether another node has failed, was stopped or is gone: the ranks here are to end, too."""
        return any(not end.is_good for end in tuple(self.ends.values())) or bool(self.gone())

    def has_failure(self) -> bool:
        """The same, but for a stop by a signal, of which the ranks here know from theirs."""
        return any(not end.is_good and end.signum is None for end in tuple(self.ends.values())) or bool(self.gone())

    def gone(self) -> list[str]:
        """The nodes that give no sign of life and have not said how they ended, in words."""
        return [self._described(other) for other in self._others if other not in self.ends and self._is_silent(other)]

    def _is_silent(self, other: int) -> bool:
        return not self._has_store or time.monotonic() - self._heard[other] > self._silence

    def conclude(self, end: NodeEnd) -> None:
        """Tell the others how this node ended, and wait for theirs: after a good end as long as they live.

        Raises:
            BaseException: what a signal handler raises meanwhile. It may be called again then.
        """
        self.watch()
        self._tell(end)
        trouble_since = math.inf
        self._silence = SILENCE_AFTER_END_SECONDS
        while any(other not in self.ends and not self._is_silent(other) for other in self._others):
            if not end.is_good or self.has_trouble():
                trouble_since = min(trouble_since, time.monotonic())
            if time.monotonic() - trouble_since > END_SECONDS:
                break
            time.sleep(0.02)

    def close(self, holds_store: bool) -> None:
        """Say goodbye, and when this process holds the store, wait until all have."""
        self._closing.set()
        self._thread.join(2 * BEAT_SECONDS)
        if not self._has_store or self._thread.is_alive():
            return
        try:
            self._store.set(f"colossus/goodbye/{self.node}", "")
            goodbyes = [f"colossus/goodbye/{other}" for other in self.ends]
            deadline = time.monotonic() + FAREWELL_SECONDS
            while holds_store and not self._store.check(goodbyes) and time.monotonic() < deadline:
                time.sleep(0.02)
        except RuntimeError:
            pass

    def _tell(self, end: NodeEnd) -> None:
        try:
            self._store.set(f"colossus/end/{self.node}", end.to_json())
            self._store.add("colossus/ends", 1)
        except RuntimeError:
            self._has_store = False

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
                            self.ends[other] = NodeEnd.from_json(self._store.get(key).decode())
                self._closing.wait(BEAT_SECONDS)
        except RuntimeError:  # its launcher has gone, and it with it
            self._has_store = False

    def _described(self, other: int) -> str:
        known = self._introductions[other]
        ranks = ", ".join(map(str, known["ranks"]))
        return f"node {other} (host {known['host']}; rank{'s' * (len(known['ranks']) > 1)} {ranks})"
