"""The traffic of collectives and point-to-point sends, as counts and as formulas. No torch.

Counts and formulas give the elements or bytes that one rank sends under the ring algorithms, whatever algorithm runs,
so that the two can be compared. A send counts its own size. ``traffic.py`` of `colossus.tensor_parallel` and of
`colossus.sequence_parallel` predict the traffic of matmuls and attention with the same formulas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


#: the collective that runs each move (see `colossus.comm.conjugate`); moves that are not listed send nothing
COLLECTIVES = {
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "sum": "all_reduce",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Traffic:
    """The number of collectives that one rank starts, and the elements that it sends in them."""

    calls: int = 0
    elements: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.elements + other.elements)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.calls * times, self.elements * times)


def sent(operation: str, num_ranks: int, input_size: float) -> float:
    """Return what one rank sends in a collective over ``num_ranks`` ranks, in the unit of ``input_size``.

    This is the nominal count of the ring algorithms (Patarasuk and Yuan, 2009), whatever algorithm runs. On n ranks,
    with S for the whole tensor, all-gather and reduce-scatter send (n-1)/n S and all-reduce sends twice that;
    all-to-all sends the n-1 of n chunks that are for other ranks.

    Args:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``.
        num_ranks: the size of the group.
        input_size: elements or bytes of the rank's input: S / n for an all-gather, S for the others.
    """
    if num_ranks == 1:
        return 0.0
    if operation == "broadcast":
        return input_size
    others = input_size * (num_ranks - 1)
    if operation == "all_gather":
        return others
    return {"reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}[operation] * others / num_ranks


def move_traffic(move: str, num_ranks: int, input_size: float) -> Traffic:
    """Return the traffic of one move of `colossus.comm.conjugate` whose input has ``input_size`` elements on a rank."""
    operation = COLLECTIVES.get(move)
    if operation is None or num_ranks == 1:
        return Traffic()
    return Traffic(1, sent(operation, num_ranks, input_size))


@dataclass
class Tally:
    """The number of operations that ran, and the bytes that this rank sent in them."""

    calls: int = 0
    bytes: float = 0.0


@dataclass(eq=False)
class Counter:
    """The calls and the sent bytes of this rank, by (operation, axes, dtype)."""

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
        """Return one row per (operation, axes, dtype), ready to print or to write as JSON."""
        return [
            {"operation": op, "axes": axes, "dtype": str(dtype).removeprefix("torch."), **vars(tally)}
            for (op, axes, dtype), tally in sorted(self.entries.items(), key=lambda item: str(item[0]))
        ]


def _matches(key: tuple[str, str, torch.dtype], axes: str | None, operation: str | None) -> bool:
    return (axes is None or key[1] == axes) and (operation is None or key[0] == operation)


#: the counters of the `count` blocks that this rank is in; accounting is off where there is none
listeners: list[Counter] = []


@contextmanager
def paused() -> Iterator[None]:
    """Count nothing inside the block, as for a recomputation that takes results from a cache and sends nothing."""
    paused_listeners = list(listeners)
    listeners.clear()
    try:
        yield
    finally:
        listeners.extend(paused_listeners)


@contextmanager
def count() -> Iterator[Counter]:
    """Count what this rank sends inside the block, in the `Counter` that the ``with`` statement gives."""
    counter = Counter()
    listeners.append(counter)
    try:
        yield counter
    finally:
        listeners.remove(counter)
