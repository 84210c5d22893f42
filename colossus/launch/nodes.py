"""Several nodes: where their launchers meet, and what they tell each other through the rendezvous' store.

A node that ends for any reason but success ends the others within seconds, and each of them can say why.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter
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


_END = TypeAdapter(NodeEnd)


class Nodes:
    """All nodes of a run, which have met when this is made; from `watch` on a thread looks after the others.

    Args:
        endpoint: where they meet. The first that can listen there holds the store through which they speak.
        local_ranks: of each.

    Attributes:
        node: number of this one.
        ends: of the other nodes that have told theirs, by number.
        address: at which the others reach this one.
        store_address: host and port, for the ranks.

    Raises:
        RuntimeError: when they do not meet (elastic's RendezvousError).
    """

    def __init__(self, endpoint: str, num_nodes: int, local_ranks: int) -> None:
        said = f"colossus: waiting at {endpoint} until all {num_nodes} nodes are there"
        timer = threading.Timer(MEET_SECONDS, print, [said], {"file": sys.stderr, "flush": True})
        timer.daemon = True
        timer.start()
        try:
            self._rendezvous, self._holds_store = _make_rendezvous(endpoint, num_nodes)
            try:
                info: Any = self._rendezvous.next_rendezvous()
            except BaseException:
                self._rendezvous.shutdown()
                raise
        finally:
            timer.cancel()
        self._store, self.node, self.num_nodes = info.store, info.rank, num_nodes
        self.store_address = info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port
        self.has_shared_store = self._rendezvous.use_agent_store
        self.ends: dict[int, NodeEnd] = {}
        self._others = [other for other in range(num_nodes) if other != self.node]
        self._has_store, self._silence = True, SILENCE_SECONDS
        self._beats: dict[int, bytes] = {}
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="colossus-nodes", daemon=True)
        # from here this machine reaches the endpoint: the loopback, where the endpoint is here and its name means that
        guess = machine.address_towards(urlsplit(f"//{endpoint}").hostname or "") or "127.0.0.1"
        ranks = [self.node * local_ranks + local for local in range(local_ranks)]
        self._known = self.exchange("node", {"host": socket.gethostname(), "ranks": ranks, "address": guess})
        self.address = machine.address_among(guess, [each["address"] for each in self._known])
        # by itself gloo takes the address that the machine's own name has, which others may not be able to reach
        if (interface := machine.interface_of(self.address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

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
        silent = [other for other in self._others if self._is_silent(other)]
        return [
            f"node {other} (host {known['host']}; rank{'s' * (len(known['ranks']) > 1)} "
            f"{', '.join(map(str, known['ranks']))})"
            for other, known in ((other, self._known[other]) for other in silent)
        ]

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
        self._rendezvous.shutdown()
        self._closing.set()
        self._thread.join(2 * BEAT_SECONDS)
        if not self._has_store or self._thread.is_alive():
            return
        goodbyes, deadline = [f"colossus/goodbye/{other}" for other in self.ends], time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(RuntimeError):
            self._store.set(f"colossus/goodbye/{self.node}", "")
            while self._holds_store and not self._store.check(goodbyes) and time.monotonic() < deadline:
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


def _make_rendezvous(endpoint: str, nodes: int) -> tuple[RendezvousHandler, bool]:
    """Elastic's, and whether its store is in this process."""
    # torch's loggers set their own levels, so only cutting them off above works: `report` prints one block
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    for is_host in (True, False) if _is_here(endpoint) else (False,):
        try:
            parameters = RendezvousParameters("c10d", endpoint, "colossus", nodes, nodes, is_host=is_host)
            return get_rendezvous_handler(parameters), is_host
        except RendezvousConnectionError:
            if not is_host:
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
