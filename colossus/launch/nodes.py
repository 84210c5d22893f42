"""What the launchers of several nodes tell each other through their rendezvous' store: that they live, how they end.

A node that ends for any reason but success ends the others within seconds, and each of them can say why. No torch.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from colossus import machine
from colossus.launch.causes import RankExit
from colossus.launch.failure import FailureRecord
from colossus.launch.server_failure import ServerFailure
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

LINGER_SECONDS = 60.0
"""How long another node may go on when the ranks here are through, before the user hears of it."""

_SERVER_FAILURE = "colossus/server_failure"


@dataclass(frozen=True)
class NodeEnd:
    """How the ranks of one node ended.

    Attributes:
        exits: global rank -> how its process ended.
        signum: the signal its launcher received, None when there was none.
        records: of its ranks that failed.
    """

    node: int
    host: str
    exits: dict[int, RankExit] = field(default_factory=dict)
    signum: int | None = None
    records: Sequence[FailureRecord] = ()

    @property
    def is_good(self) -> bool:
        """Whether there were ranks, and all came to the end of their program."""
        if self.signum is not None or not self.exits:
            return False
        return all(ended.code == 0 and not ended.is_early for ended in self.exits.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeEnd:
        read = json.loads(text)
        read["exits"] = {int(rank): RankExit(**ended) for rank, ended in read["exits"].items()}
        read["records"] = [FailureRecord(**record) for record in read["records"]]
        return cls(**read)


class Nodes:
    """The other nodes, all of which have met already; from `watch` on a thread looks after them.

    Args:
        store: of the rendezvous; one of the nodes holds it.
        node: number of this one.
        ranks: of this one.
        address: at which this one guesses that the others reach it.

    Attributes:
        ends: of the nodes that have told theirs, by number.
        address: at which the others reach this one.
        server_failure: of a parameter server, on whichever node it was.
    """

    def __init__(self, store: Any, node: int, num_nodes: int, ranks: Sequence[int], address: str) -> None:
        self._store, self.node, self.num_nodes = store, node, num_nodes
        self.host = socket.gethostname()
        self.ends: dict[int, NodeEnd] = {}
        self.server_failure: ServerFailure | None = None
        self._others = [other for other in range(num_nodes) if other != node]
        self._has_store, self._silence = True, SILENCE_SECONDS
        self._beats: dict[int, bytes] = {}
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._closing = threading.Event()
        store.set(f"colossus/node/{node}", json.dumps({"host": self.host, "ranks": list(ranks), "address": address}))
        told = store.multi_get([f"colossus/node/{other}" for other in range(num_nodes)])
        self._introductions: list[dict[str, Any]] = [json.loads(text) for text in told]
        self.address = machine.address_among(address, [known["address"] for known in self._introductions])
        self._thread = threading.Thread(target=self._watch, name="colossus-nodes", daemon=True)

    def watch(self) -> None:
        """Begin to give signs of life, and to look for those of the others."""
        if self._thread.ident is None:
            self._heard = dict.fromkeys(self._others, time.monotonic())
            self._thread.start()

    def has_trouble(self) -> bool:
        """Whether another node has failed, was stopped or is gone: the ranks here are to end, too."""
        if self.server_failure is not None:
            return True
        return any(not end.is_good for end in tuple(self.ends.values())) or bool(self.gone())

    def has_failure(self) -> bool:
        """The same, but for a stop by a signal, of which the ranks here know from theirs."""
        if self.server_failure is not None:
            return True
        return any(not end.is_good and end.signum is None for end in tuple(self.ends.values())) or bool(self.gone())

    def gone(self) -> list[str]:
        """The nodes that give no sign of life and have not said how they ended, in words."""
        return [self._described(other) for other in self._others if self._is_gone(other)]

    def _is_gone(self, other: int) -> bool:
        return other not in self.ends and self._is_silent(other)

    def _is_silent(self, other: int) -> bool:
        return not self._has_store or time.monotonic() - self._heard[other] > self._silence

    def tell_server_failure(self, failure: ServerFailure) -> None:
        """A server of this node has failed: all nodes are to end. The first that is told of counts."""
        try:
            told = self._store.compare_set(_SERVER_FAILURE, "", failure.to_json())
            self.server_failure = ServerFailure.from_json(told)
        except RuntimeError:
            self._has_store, self.server_failure = False, failure

    def conclude(self, end: NodeEnd, look: Callable[[], object] = lambda: None) -> None:
        """Tell the others how this node ended, and wait for theirs: after a good end as long as they live.

        Args:
            look: called again and again meanwhile.

        Raises:
            BaseException: what a signal handler raises meanwhile. It may be called again then.
        """
        self.watch()
        self._tell(end)
        since, trouble_since, has_spoken = time.monotonic(), math.inf, False
        self._silence = SILENCE_AFTER_END_SECONDS
        while left := [other for other in self._others if other not in self.ends and not self._is_silent(other)]:
            look()
            now = time.monotonic()
            if not end.is_good or self.has_trouble():
                trouble_since = min(trouble_since, now)
            if now - trouble_since > END_SECONDS:
                break
            if now - since > LINGER_SECONDS and not has_spoken:
                has_spoken = True
                print(
                    f"colossus: the ranks here are through, but {LINGER_SECONDS:g} s later there is still work on "
                    f"{'; '.join(map(self._described, left))}; Ctrl-C ends the run",
                    file=sys.stderr,
                    flush=True,
                )
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
        number, num_ends = 0, 0
        alive = [f"colossus/alive/{other}" for other in self._others]
        try:
            while not self._closing.is_set():
                number += 1
                self._store.set(f"colossus/alive/{self.node}", str(number))
                if self._store.check(alive):
                    for other, beat in zip(self._others, self._store.multi_get(alive), strict=True):
                        if self._beats.get(other) != beat:
                            self._beats[other], self._heard[other] = beat, time.monotonic()
                if self.server_failure is None and self._store.check([_SERVER_FAILURE]):
                    self.server_failure = ServerFailure.from_json(self._store.get(_SERVER_FAILURE))
                told = self._store.add("colossus/ends", 0)
                if told != num_ends:
                    num_ends = told
                    self._read_ends()
                self._closing.wait(BEAT_SECONDS)
        except RuntimeError:  # its launcher has gone, and it with it
            self._has_store = False

    def _read_ends(self) -> None:
        for other in self._others:
            key = f"colossus/end/{other}"
            if self._store.check([key]):
                self.ends[other] = NodeEnd.from_json(self._store.get(key).decode())

    def _described(self, other: int) -> str:
        known = self._introductions[other]
        ranks = ", ".join(map(str, known["ranks"]))
        return f"node {other} (host {known['host']}; rank{'s' * (len(known['ranks']) > 1)} {ranks})"
