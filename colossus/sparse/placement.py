"""Which rank stores which rows of a table. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

#: into how many partitions the rows of an owner are cut, where nothing else is said
PARTS_PER_OWNER = 16
#: in which touched rows are counted
_MOST_BINS = 1 << 17

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Placement:
    """A table cut into partitions, contiguous ranges of rows.

    An owner stores its partitions one below the other, in the order of rows.

    Attributes:
        bounds: partition p has rows bounds[p]..bounds[p + 1] of the table; ascending, from 0 to all rows.
        owners: of each partition the group index of the rank that stores it.
    """

    bounds: tuple[int, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.owners) + 1
        assert self.bounds[0] == 0
        assert all(start < stop for start, stop in pairwise(self.bounds)), "partitions without rows"

    @classmethod
    def equal(cls, num_rows: int, num_owners: int, num_parts: int) -> Placement:
        """Neighbouring rows to each owner, ceil(rows / owners) but for the last ones: as a `Layout` cuts them.

        Args:
            num_parts: over all owners; fewer where there are no rows for them.
        """
        chunk = -(-num_rows // num_owners)
        bounds, owners = [0], []
        for owner in range(num_owners):
            start, stop = min(owner * chunk, num_rows), min((owner + 1) * chunk, num_rows)
            count = max(1, num_parts // num_owners + (owner < num_parts % num_owners))
            for part in range(count):
                end = start + (stop - start) * (part + 1) // count
                if end > bounds[-1]:
                    bounds.append(end)
                    owners.append(owner)
        return cls(tuple(bounds), tuple(owners))

    @classmethod
    def balanced(cls, touched: Sequence[float] | _Array, num_rows: int, num_owners: int, num_parts: int) -> Placement:
        """Owners with even loads, of bytes that travel and of memory.

        Bounds are quantiles of the mean of both loads, so a hot row is alone, and cold rows are many in one partition.
        Partitions are then placed largest first, each with the owner whose larger load stays smallest.

        Args:
            touched: how often the rows of each of some equal bins (`bins_of`) were fetched or sent, in any unit.
        """
        edges = bins_of(num_rows, len(touched))
        counts = np.asarray(touched, dtype=np.float64)
        total = counts.sum()
        of_bins = counts / total if total > 0 else np.diff(edges) / num_rows
        weight = np.concatenate(([0.0], np.cumsum((of_bins + np.diff(edges) / num_rows) / 2)))
        targets = np.arange(1, num_parts) * (weight[-1] / num_parts)
        inner = np.rint(np.interp(targets, weight, edges)).astype(np.int64)
        bounds = np.unique(np.concatenate(([0], inner, [num_rows])))
        # of bins that a bound cuts, each part has its share
        passed = np.interp(bounds, edges, np.concatenate(([0.0], np.cumsum(of_bins))))
        loads = np.stack((np.diff(passed), np.diff(bounds) / num_rows), axis=1)
        held = np.zeros((num_owners, 2))
        owners = np.zeros(len(loads), dtype=np.int64)
        for part in np.argsort(-loads.max(1), kind="stable"):
            owners[part] = int((held + loads[part]).max(1).argmin())
            held[owners[part]] += loads[part]
        return cls(tuple(bounds.tolist()), tuple(owners.tolist()))

    @property
    def num_parts(self) -> int:
        return len(self.owners)

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    def owners_of(self, rows: _Array) -> _Array:
        """Of each row its owner."""
        return np.asarray(self.owners)[np.searchsorted(self.bounds[1:], rows, side="right")]

    def intervals(self, owner: int) -> tuple[tuple[int, int], ...]:
        """The rows that an owner stores, ascending; neighbouring partitions are one."""
        found: list[tuple[int, int]] = []
        for start, stop in self._parts_of(owner):
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
        return tuple(found)

    def rows(self, owner: int) -> int:
        """How many rows an owner stores."""
        return sum(stop - start for start, stop in self._parts_of(owner))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Of each partition, at which of its owner's rows it begins."""
        filled: dict[int, int] = {}
        found = []
        for (start, stop), owner in zip(pairwise(self.bounds), self.owners, strict=True):
            found.append(filled.get(owner, 0))
            filled[owner] = found[-1] + stop - start
        return tuple(found)

    def loads(self, touched: Sequence[float] | _Array, num_owners: int) -> list[float]:
        """What each owner has of the counts of some equal bins."""
        counts = np.asarray(touched, dtype=np.float64)
        edges = bins_of(self.num_rows, len(counts))
        passed = np.interp(self.bounds, edges, np.concatenate(([0.0], np.cumsum(counts))))
        return np.bincount(self.owners, np.diff(passed), num_owners).tolist()

    def _parts_of(self, owner: int) -> Iterator[tuple[int, int]]:
        return (span for span, of in zip(pairwise(self.bounds), self.owners, strict=True) if of == owner)


def bins_for(num_rows: int) -> int:
    """How many bins count the rows that are touched: one for each row, or as many as fit into a megabyte."""
    return min(num_rows, _MOST_BINS)


def bins_of(num_rows: int, num_bins: int) -> _Array:
    """Bounds of equal bins: bin b has rows [b]..[b + 1]; row r is in bin ((r + 1) * bins - 1) // rows."""
    return np.arange(num_bins + 1, dtype=np.int64) * num_rows // num_bins
