"""What is told of servers in metrics: staleness, bytes, waiting, how busy they are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.client import Servers
from colossus.server.handles import Handle

#: seconds between two questions how busy servers are
_ASK_EVERY = 1.0


class ServerReport:
    """Of one rank.

    Args:
        is_logging: whether this rank is the one that writes metrics, and asks the servers.
    """

    def __init__(self, servers: Servers, *, is_logging: bool) -> None:
        self._servers, self._is_logging = servers, is_logging
        self._pushed = self._pulled = 0
        self._seconds = 0.0
        #: of the pushes since the last report, the staleness of the stalest tensor in each
        self._stale: list[int] = []
        self._histogram: Counter[int] = Counter()
        self._asked: tuple[float, Handle[list[dict[str, Any]]]] | None = None
        self._before: tuple[float, list[float]] | None = None
        self._load: dict[str, float] = {}

    def pushed(self, values: Iterable[Tensor | RowGradient | None]) -> None:
        for value in values:
            if isinstance(value, RowGradient):
                self._pushed += value.ids.nbytes + value.rows.nbytes
            elif value is not None:
                self._pushed += value.nbytes

    def pulled(self, num_bytes: int) -> None:
        self._pulled += num_bytes

    def waited(self, seconds: float) -> None:
        self._seconds += seconds

    def staleness(self, of_tensors: Iterable[int | None]) -> None:
        """Of one push: updates of each tensor between the pull and the push."""
        most = max((stale for stale in of_tensors if stale is not None), default=None)
        if most is not None:
            self._stale.append(most)
            self._histogram[most] += 1

    def histogram(self) -> dict[str, float]:
        """Of the run so far: how many pushes of this rank were how stale."""
        return {f"staleness.{stale}": float(count) for stale, count in sorted(self._histogram.items())}

    def of_step(self) -> dict[str, float]:
        """Since the last call."""
        found = {
            "push_bytes": float(self._pushed),
            "pull_bytes": float(self._pulled),
            "server_wait_seconds": self._seconds,
        }
        if self._stale:
            found |= {"staleness": sum(self._stale) / len(self._stale), "staleness_max": float(max(self._stale))}
        self._pushed = self._pulled = 0
        self._seconds, self._stale = 0.0, []
        return found | self._load_of_servers()

    def _load_of_servers(self) -> dict[str, float]:
        """The share of time in which the busiest server was busy, between the last two answers. Nobody waits."""
        if not self._is_logging:
            return {}
        now = time.monotonic()
        if self._asked is not None and self._asked[1].is_done():
            busy = [float(each["busy_seconds"]) for each in self._asked[1].wait()]
            at = self._asked[0]
            if self._before is not None and at > self._before[0]:
                shares = [
                    (after - before) / (at - self._before[0])
                    for after, before in zip(busy, self._before[1], strict=True)
                ]
                self._load = {"server_load": max(shares)}
            self._before, self._asked = (at, busy), None
        if self._asked is None and (self._before is None or now - self._before[0] > _ASK_EVERY):
            self._asked = now, self._servers.stats()
        return self._load
