"""Counts what every collective and point-to-point send moves.

Bytes are what one rank sends under the ring algorithms, whatever algorithm runs, so that a count can be compared with a
formula (see `colossus.comm.cost`). A send counts its own size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Tally:
    """How many operations ran, and the bytes that this rank sent in them."""

    calls: int = 0
    bytes: float = 0.0


@dataclass(eq=False)
class Counter:
    """Calls and bytes sent by this rank, by (operation, axes, dtype)."""

    entries: dict[tuple[str, str, torch.dtype], Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, operation: str, axes: str, dtype: torch.dtype, sent: float) -> None:
        tally = self.entries[operation, axes, dtype]
        tally.calls += 1
        tally.bytes += sent

    def calls(self, axes: str | None = None, operation: str | None = None) -> int:
        return sum(t.calls for key, t in self.entries.items() if _matches(key, axes, operation))

    def bytes(self, axes: str | None = None, operation: str | None = None) -> float:
        return sum(t.bytes for key, t in self.entries.items() if _matches(key, axes, operation))

    def rows(self) -> list[dict[str, object]]:
        """One row per (operation, axes, dtype), ready to print or to write as JSON."""
        return [
            {"operation": op, "axes": axes, "dtype": str(dtype).removeprefix("torch."), **vars(tally)}
            for (op, axes, dtype), tally in sorted(self.entries.items(), key=lambda item: str(item[0]))
        ]


def _matches(key: tuple[str, str, torch.dtype], axes: str | None, operation: str | None) -> bool:
    return (axes is None or key[1] == axes) and (operation is None or key[0] == operation)


#: the counters inside whose `count` this rank is; empty means accounting is off
listeners: list[Counter] = []


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is counted inside the block: for a recomputation that takes results from a cache and moves nothing."""
    paused_listeners = list(listeners)
    listeners.clear()
    try:
        yield
    finally:
        listeners.extend(paused_listeners)


@contextmanager
def count() -> Iterator[Counter]:
    """``with count() as moved:`` counts what this rank sends inside the block."""
    counter = Counter()
    listeners.append(counter)
    try:
        yield counter
    finally:
        listeners.remove(counter)
