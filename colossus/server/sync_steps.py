"""Synchronous steps at a server: the sum of what all workers give, the same whatever comes first."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.shard import Part


class GradientSum:
    """Parts of the gradient of one shard in one step, added up in the order of the workers.

    Args:
        workers: who gives a part each, ascending.
        keeps_parts: whether workers may be left out at the end; else a dense part is freed as soon as it was added.
    """

    def __init__(self, workers: tuple[int, ...], keeps_parts: bool) -> None:
        self.workers, self._keeps_parts = workers, keeps_parts
        self._parts: dict[int, Part] = {}
        self._dense: Tensor | None = None
        self._num_added = 0

    def add(self, worker: int, part: Part) -> None:
        """Take a part. Its tensors are this object's from then on."""
        if worker not in self.workers:
            raise ValueError(f"worker {worker} is none of those that take part: {list(self.workers)}")
        if worker in self._parts:
            raise ValueError(f"worker {worker} has given its part already")
        self._parts[worker] = part
        if not self._keeps_parts:
            self._add_early()

    def _add_early(self) -> None:
        """Add the dense parts of all workers before the first that is missing; rows are added at the end, at once."""
        while self._num_added < len(self.workers) and (worker := self.workers[self._num_added]) in self._parts:
            part = self._parts[worker]
            if isinstance(part, RowGradient):
                return
            if part is not None:
                self._dense = part if self._dense is None else self._dense.add_(part)
                self._parts[worker] = None
            self._num_added += 1

    @property
    def num_given(self) -> int:
        return len(self._parts)

    def missing(self, included: Iterable[int]) -> list[int]:
        return [worker for worker in included if worker not in self._parts]

    def total(self, included: Iterable[int], like: Tensor) -> Part:
        """The sum of the parts of some workers, which are all there.

        Args:
            like: values of the shard.
        """
        parts = [self._parts[worker] for worker in sorted(included)]
        given = [part for part in parts if part is not None]
        if self._dense is None and given and all(isinstance(part, RowGradient) for part in given):
            return RowGradient.added([part for part in given if isinstance(part, RowGradient)])
        total = self._dense
        for part in given:
            if isinstance(part, RowGradient):
                total = torch.zeros_like(like, dtype=part.rows.dtype) if total is None else total
                total.index_add_(0, part.ids, part.rows)
            else:
                total = part.clone() if total is None else total.add_(part)
        return total


class SyncSteps:
    """The steps of one shard.

    Attributes:
        applied: the newest step that was applied.
        num_late: parts that are in no sum: their step was closed without them.
    """

    def __init__(self) -> None:
        self.applied = -1
        self.num_late = 0
        self._sums: dict[int, GradientSum] = {}
        self._totals: dict[int, Part] = {}
        self._squares: dict[int, float] = {}

    def accumulate(self, step: int, worker: int, part: Part, workers: tuple[int, ...], keeps_parts: bool) -> bool:
        """Take a part; False: its step is closed, and it is dropped."""
        if step <= self.applied or step in self._totals:
            self.num_late += 1
            return False
        found = self._sums.setdefault(step, GradientSum(workers, keeps_parts))
        if found.workers != workers:
            raise ValueError(
                f"worker {worker} gives it with workers {list(workers)}, and another with {list(found.workers)}"
            )
        found.add(worker, part)
        return True

    def missing(self, step: int, included: tuple[int, ...]) -> list[int]:
        """Who has not given a part of a step that was not applied."""
        if step <= self.applied or step in self._totals:
            return []
        return self._sums[step].missing(included) if step in self._sums else list(included)

    def squares(self, step: int, included: tuple[int, ...], like: Tensor) -> float | None:
        """The square of the norm of the sum, of a step of which nothing is missing; None: it was applied long ago."""
        if step > self.applied and step not in self._totals:
            found = self._sums.pop(step)
            self.num_late += found.num_given - len(included)
            total = found.total(included, like)
            self._totals[step], self._squares[step] = total, _squares(total)
        return self._squares.get(step)

    def peek(self, step: int) -> Part:
        """What `take` will give.

        Raises:
            ValueError: `take` cannot be: the squares of the step were not asked for, so it may be incomplete.
        """
        if step <= self.applied:
            return None
        if step not in self._totals:
            raise ValueError(f"step {step} is to be applied before the squares of its sums were taken")
        return self._totals[step]

    def take(self, step: int) -> Part:
        """The sum, to be applied now; None: it is nothing, or was applied before."""
        if step <= self.applied:
            return None
        total, self._squares = self._totals[step], {step: self._squares[step]}
        self._totals = {number: kept for number, kept in self._totals.items() if number > step}
        for old in [number for number in self._sums if number < step]:
            self.num_late += self._sums.pop(old).num_given
        self.applied = step
        return total


def _squares(total: Part) -> float:
    values = total.rows if isinstance(total, RowGradient) else total
    if values is None or not values.numel():
        return 0.0
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).square())
