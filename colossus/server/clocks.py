"""The clocks of workers under stale synchronous parallelism (SSP; Ho et al., NIPS 2013). No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Clocks:
    """How many steps each worker has finished.

    Nobody waits for a worker that has gone: its clock is infinite until it is heard of again.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, float] = {}

    def expect(self, workers: Iterable[int]) -> None:
        """These take part; one that was never heard of is at the start."""
        for worker in workers:
            self._clocks.setdefault(worker, 0)

    def advance(self, worker: int, step: int) -> None:
        """A worker has finished ``step`` steps."""
        self._clocks[worker] = step

    def leave(self, worker: int) -> None:
        self._clocks[worker] = math.inf

    def may_begin(self, step: int, max_staleness: int) -> bool:
        """Whether a worker that has finished ``step`` steps may begin the next: no other is more than ``max_staleness``
        steps behind."""
        return self.slowest >= step - max_staleness

    def behind(self, step: int, max_staleness: int) -> list[int]:
        """Those that `may_begin` waits for, ascending."""
        return sorted(worker for worker, clock in self._clocks.items() if clock < step - max_staleness)

    @property
    def slowest(self) -> float:
        """The clock of the slowest worker that is there; infinite where none is."""
        return min(self._clocks.values(), default=math.inf)
