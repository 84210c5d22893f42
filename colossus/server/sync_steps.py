"""Synchronous steps at a server: parts of gradients, the squares of their sums, one update.

A sum is the same whatever comes first: parts are added up in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.messages import Request
from colossus.server.shard import Part
from colossus.server.stored_tensors import StoredTensors
from colossus.server.waiting import Answer, Awaited, WaitingRequests


class GradientSum:
    """Parts of the gradient of one shard in one step.

    Args:
        workers: who gives a part each, ascending.
    """

    def __init__(self, workers: tuple[int, ...]) -> None:
        self.workers = workers
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
        self._add_early()

    def _add_early(self) -> None:
        """Add the dense parts of all workers before the first that is missing, so that they can be freed; rows are
        added at the end, at once."""
        while self._num_added < len(self.workers) and (worker := self.workers[self._num_added]) in self._parts:
            part = self._parts[worker]
            if isinstance(part, RowGradient):
                return
            if part is not None:
                self._dense = part if self._dense is None else self._dense.add_(part)
                self._parts[worker] = None
            self._num_added += 1

    def missing(self) -> list[int]:
        return [worker for worker in self.workers if worker not in self._parts]

    def total(self, like: Tensor) -> Part:
        """The sum of all parts.

        Args:
            like: values of the shard.
        """
        given = [part for worker in self.workers if (part := self._parts[worker]) is not None]
        rows = [part for part in given if isinstance(part, RowGradient)]
        if self._dense is None and rows and len(rows) == len(given):
            return RowGradient.added(rows)
        total = self._dense
        for part in given:
            if isinstance(part, RowGradient):
                total = torch.zeros_like(like, dtype=part.rows.dtype) if total is None else total
                total.index_add_(0, part.ids, part.rows)
            else:
                total = part.clone() if total is None else total.add_(part)
        return total


class ShardSteps:
    """The steps of one shard.

    Attributes:
        applied: the newest step that was applied.
    """

    def __init__(self) -> None:
        self.applied = -1
        self._sums: dict[int, GradientSum] = {}
        self._totals: dict[int, tuple[Part, float]] = {}

    def accumulate(self, step: int, worker: int, part: Part, workers: tuple[int, ...]) -> None:
        """Take a part."""
        if step <= self.applied or step in self._totals:
            raise ValueError(f"worker {worker} gives a part of step {step}, whose sum was taken already")
        found = self._sums.setdefault(step, GradientSum(workers))
        if found.workers != workers:
            raise ValueError(
                f"worker {worker} gives it with workers {list(workers)}, and another with {list(found.workers)}"
            )
        found.add(worker, part)

    def missing(self, step: int, workers: Sequence[int]) -> list[int]:
        """Who has not given a part of a step that was not applied."""
        if step <= self.applied or step in self._totals:
            return []
        return self._sums[step].missing() if step in self._sums else list(workers)

    def squares(self, step: int, like: Tensor) -> float:
        """The square of the norm of the sum, of a step of which nothing is missing."""
        if step not in self._totals:
            if step not in self._sums:
                raise ValueError(f"step {step} was applied already, and a newer one after it")
            total = self._sums.pop(step).total(like)
            self._totals[step] = total, _squares(total)
        return self._totals[step][1]

    def peek(self, step: int) -> Part:
        """What `take` will give.

        Raises:
            ValueError: `take` cannot be: the squares of the step were not asked for, so it may be incomplete.
        """
        if step <= self.applied:
            return None
        if step not in self._totals:
            raise ValueError(f"step {step} is to be applied before the squares of its sums were taken")
        return self._totals[step][0]

    def take(self, step: int) -> Part:
        """The sum, to be applied now; None: it is nothing, or was applied before. Older steps have failed."""
        if step <= self.applied:
            return None
        total, squares = self._totals[step]
        self._totals = {number: kept for number, kept in self._totals.items() if number > step}
        self._totals[step] = None, squares  # others of its workers may ask for the squares yet
        self._sums = {number: kept for number, kept in self._sums.items() if number > step}
        self.applied = step
        return total


class SyncSteps:
    """Requests of synchronous steps at one server.

    Args:
        gone: workers that have ended, and why.
    """

    def __init__(self, tensors: StoredTensors, waiting: WaitingRequests, gone: Mapping[int, str]) -> None:
        self._tensors, self._waiting, self._gone = tensors, waiting, gone
        self._steps: dict[str, ShardSteps] = {}

    def accumulate(self, request: Request) -> None:
        """Parts of a step. Header: step, names, kinds, workers (who take part)."""
        header = request.header
        found = self._tensors.parts(header["names"], header["kinds"], request.arrays)
        for shard, part in found:
            shard.check("gradient", part, {"lr": 0.0})
        for name, (_, part) in zip(header["names"], found, strict=True):
            steps = self._steps.setdefault(name, ShardSteps())
            steps.accumulate(header["step"], request.worker, _own(part), tuple(header["workers"]))
        request.reply()

    def squares(self, request: Request) -> None:
        """Of each tensor the square of the norm of the sum over workers, answered when all parts are here. Header:
        step, names, workers. The reply: one array, float64 [names]."""
        step, names, workers = request.header["step"], request.header["names"], request.header["workers"]

        def missing() -> dict[str, list[int]]:
            return {name: self._steps.setdefault(name, ShardSteps()).missing(step, workers) for name in names}

        def answer() -> Answer | None:
            shards = self._tensors.shards(names)
            for name, those in missing().items():
                for worker in those:
                    if worker in self._gone:
                        raise ValueError(
                            f"worker {worker} has gone ({self._gone[worker]}) without its part of {name!r} in step "
                            f"{step}"
                        )
                if those:
                    return None
            found = [self._steps[name].squares(step, shard.values) for name, shard in zip(names, shards, strict=True)]
            return lambda: request.reply({}, [torch.tensor(found, dtype=torch.float64)])

        def awaited() -> Awaited:
            found = missing()
            late = sorted({worker for those in found.values() for worker in those})
            of = next((repr(name) for name, those in found.items() if those), "any tensor")
            return late, f"have not given their part of {of} in step {step}"

        self._waiting.add(request, answer, awaited)

    def apply(self, request: Request) -> list[Tensor]:
        """Update by the sums of a step, once, whoever asks first. Header: step, names, options (for each: of the
        optimizer, and scale), found_inf: the sums are dropped. Returns the values afterwards. What one tensor refuses
        changes none, and no sum is taken."""
        header = request.header
        step, names = header["step"], header["names"]
        shards = self._tensors.shards(names)
        for name, shard, options in zip(names, shards, header["options"], strict=True):
            if name not in self._steps:
                raise ValueError(f"step {step} of {name!r} is to be applied, and nobody has given a part of it")
            total = self._steps[name].peek(step)
            if total is not None and not header["found_inf"]:
                shard.check("gradient", total, options)
        for name, shard, options in zip(names, shards, header["options"], strict=True):
            total = self._steps[name].take(step)
            if total is not None and not header["found_inf"]:
                shard.push("gradient", total, options)
        return [shard.values for shard in shards]

    def restart(self, names: list[str]) -> None:
        """Forget steps of tensors: their state was loaded, or they were freed."""
        for name in names:
            self._steps.pop(name, None)


def _own(part: Part) -> Part:
    """A copy; what is narrower than float32 is widened, to be added up."""
    if part is None:
        return None
    if isinstance(part, RowGradient):
        return RowGradient(part.ids.clone(), _wide(part.rows))
    return _wide(part)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.itemsize < torch.float32.itemsize else values.dtype, copy=True)


def _squares(total: Part) -> float:
    values = total.rows if isinstance(total, RowGradient) else total
    if values is None or not values.numel():
        return 0.0
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).square())
