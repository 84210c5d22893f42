"""Which workers a synchronous step is made of where the slowest are not waited for (backup workers; 1604.00981). No
torch."""

from __future__ import annotations

from collections.abc import Container

#: closed steps that are remembered, for workers that are late
_REMEMBERED = 16


class Arrivals:
    """One server decides for all, so that they take the same workers."""

    def __init__(self) -> None:
        self._arrived: dict[int, set[int]] = {}
        self._closed: dict[int, tuple[int, ...]] = {}
        self.newest = -1

    def arrive(self, step: int, worker: int) -> None:
        """A worker has given all its parts of a step to all servers."""
        if step > self.newest:
            self._arrived.setdefault(step, set()).add(worker)

    def missing(self, step: int, workers: tuple[int, ...], gone: Container[int]) -> list[int]:
        """Who may still arrive in a step that is not closed."""
        arrived = self._arrived.get(step, set())
        return [worker for worker in workers if worker not in arrived and worker not in gone]

    def included(
        self, step: int, workers: tuple[int, ...], backups: int, gone: Container[int]
    ) -> tuple[int, ...] | None:
        """Who is included in a step, ascending: whoever came first, all but ``backups`` of the workers, or all that are
        left where fewer are. None: not known yet. Empty: it was long ago."""
        if step not in self._closed:
            if step <= self.newest:
                return ()
            arrived = self._arrived.get(step, set())
            awaited = [worker for worker in workers if worker in arrived or worker not in gone]
            if len(arrived) < min(len(workers) - backups, len(awaited)):
                return None
            self._closed[step], self.newest = tuple(sorted(arrived)), step
            self._arrived = {number: found for number, found in self._arrived.items() if number > step}
            for old in [number for number in self._closed if number <= step - _REMEMBERED]:
                del self._closed[old]
        return self._closed[step]
