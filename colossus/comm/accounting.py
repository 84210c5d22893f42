"""What every collective and point-to-point send moves: counted, and as formulas. No torch.

Elements and bytes are what one rank sends under the ring algorithms, whatever algorithm runs, so that a count can be
compared with a formula. A send counts its own size. What a matmul or an attention will send is predicted with the same
formulas (``traffic.py`` of `colossus.tensor_parallel` and of `colossus.sequence_parallel`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


#: the collective of each move that sends something (see `colossus.comm.conjugate`); the others stay on their rank
COLLECTIVES = {
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "sum": "all_reduce",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Traffic:
    """Collectives that one rank starts, and elements that it sends in them."""

    calls: int = 0
    elements: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.elements + other.elements)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.calls * times, self.elements * times)


def sent(operation: str, num_ranks: int, held: float) -> float:
    """What one rank sends in a collective over n = ``num_ranks`` ranks, in the unit of ``held``.

    The nominal count of the ring algorithms (Patarasuk and Yuan, 2009), whatever algorithm runs. With S for the whole
    tensor, all-gather and reduce-scatter send (n-1)/n S, all-reduce sends both; all-to-all sends the n-1 of n chunks
    that are not the rank's own.

    Args:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``.
        held: elements or bytes that the rank holds before: S / n for an all-gather, S for the others.
    """
    if num_ranks == 1:
        return 0.0
    if operation == "broadcast":
        return held
    others = held * (num_ranks - 1)
    if operation == "all_gather":
        return others
    return {"reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}[operation] * others / num_ranks


def move_traffic(move: str, num_ranks: int, held: float) -> Traffic:
    """Traffic of one move, named as in `colossus.comm.conjugate`, of a tensor of which the rank holds ``held``."""
    operation = COLLECTIVES.get(move)
    if operation is None or num_ranks == 1:
        return Traffic()
    return Traffic(1, sent(operation, num_ranks, held))


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
