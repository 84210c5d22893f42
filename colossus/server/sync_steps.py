"""Synchronous steps at a server: parts of gradients, the squares of their sums, one update; and requests that wait.

A sum does not depend on the order of arrival: parts are added in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.calls import Request
from colossus.server.shard import Part, Shard

#: workers that a request waits for, and what these have not done
Awaited = tuple[list[int], str]


@dataclass(eq=False)
class _Deferred:
    request: Request
    try_to_answer: Callable[[], Awaited | None]
    awaited: Awaited = ([], "")


class WaitingRequests:
    """Requests that are answered later, when other workers have done what they wait for."""

    def __init__(self) -> None:
        self._deferred: list[_Deferred] = []

    def of(self, worker: int) -> list[Awaited]:
        """Return what each request of a worker waits for."""
        return [deferred.awaited for deferred in self._deferred if deferred.request.worker == worker]

    def add(self, request: Request, try_to_answer: Callable[[], Awaited | None]) -> None:
        """Add a request, to be answered once that is possible.

        Args:
            request: the request.
            try_to_answer: answers it, or returns what it waits for. If it raises, the request is refused.
        """
        self._deferred.append(_Deferred(request, try_to_answer))

    def drop(self, worker: int) -> None:
        """Drop the requests of a worker that is gone."""
        self._deferred = [deferred for deferred in self._deferred if deferred.request.worker != worker]

    def retry(self) -> None:
        """Try to answer all requests, until no answer makes another one possible."""
        while answered_requests := [deferred for deferred in self._deferred if self._is_answered(deferred)]:
            self._deferred = [deferred for deferred in self._deferred if deferred not in answered_requests]

    @staticmethod
    def _is_answered(deferred: _Deferred) -> bool:
        try:
            awaited = deferred.try_to_answer()
        except Exception as error:
            deferred.request.fail(error)
            return True
        deferred.awaited = awaited or deferred.awaited
        return awaited is None


class GradientSum:
    """Parts of the gradient of one shard in one step.

    Args:
        workers: the workers that send a part each, ascending.
    """

    def __init__(self, workers: Sequence[int]) -> None:
        self.workers = list(workers)
        self._parts: dict[int, Part] = {}
        self._dense: Tensor | None = None
        self._num_added = 0

    def add(self, worker: int, part: Part) -> None:
        """Take ownership of a worker's part.

        Dense parts of all workers before the first missing one are added at once and freed. Rows are added at the end.
        """
        if worker in self._parts:
            raise ValueError(f"worker {worker} has sent its part already")
        self._parts[worker] = part
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
        """Return the sum of all parts.

        Args:
            like: values of the shard.
        """
        parts = [part for worker in self.workers if (part := self._parts[worker]) is not None]
        rows = [part for part in parts if isinstance(part, RowGradient)]
        if self._dense is None and rows and len(rows) == len(parts):
            return RowGradient.added(rows)
        total = self._dense
        for part in parts:
            if isinstance(part, RowGradient):
                total = torch.zeros_like(like, dtype=part.rows.dtype) if total is None else total
                total.index_add_(0, part.ids, part.rows)
            else:
                total = part.clone() if total is None else total.add_(part)
        return total


class _ShardSteps:
    """The newest step of one shard, and the squares of the step before, which a slow worker may still ask for.

    Attributes:
        step: the newest step with a part; older ones are over.
        sum: sum of this step.
        total: the sum, once it is complete and was asked for.
        squares: square of its norm, by step: of this step and of the last one that was applied.
        applied: the newest step that was applied.
    """

    def __init__(self) -> None:
        self.step = self.applied = -1
        self.sum = GradientSum(())
        self.total: Part = None
        self.squares: dict[int, float] = {}

    def accumulate(self, step: int, worker: int, part: Part, workers: Sequence[int]) -> None:
        if step < self.step or step in self.squares:
            raise ValueError(f"worker {worker} sends a part of step {step}, whose sum was taken already")
        if step > self.step:  # an earlier step that was not applied has failed
            self.step, self.sum, self.total = step, GradientSum(workers), None
            self.squares = {number: square for number, square in self.squares.items() if number == self.applied}
        self.sum.add(worker, part)

    def missing(self, step: int, workers: Sequence[int]) -> list[int]:
        """Return the workers that have not sent their part of a step."""
        if step in self.squares:
            return []
        return self.sum.missing() if step == self.step else list(workers)

    def squares_of(self, step: int, like: Tensor) -> float:
        """Return the square of the norm of the sum of a step whose parts are complete."""
        if step not in self.squares:
            self.total = self.sum.total(like)
            values = self.total.rows if isinstance(self.total, RowGradient) else self.total
            norm = 0.0 if values is None else float(torch.linalg.vector_norm(values, dtype=torch.float64))
            self.squares[step] = norm * norm
        return self.squares[step]

    def take_total(self, step: int) -> Part:
        """Return the sum to apply now; None if it is nothing, or was applied before."""
        if step <= self.applied:
            return None
        if step not in self.squares:
            raise ValueError(f"step {step} is to be applied before the squares of its sums were taken")
        total, self.total = self.total, None
        self.applied, self.sum = step, GradientSum(())
        return total


class SyncSteps:
    """Requests of synchronous steps at one server.

    Args:
        shards: shards by name.
        waiting: requests that wait.
        gone: workers that have ended, and why.
    """

    def __init__(self, shards: Mapping[str, Shard], waiting: WaitingRequests, gone: Mapping[int, str]) -> None:
        self._shards, self._waiting, self._gone = shards, waiting, gone
        self._steps: dict[str, _ShardSteps] = {}

    def accumulate(self, request: Request, parts: Sequence[tuple[Shard, Part]]) -> None:
        """Add a worker's parts of a step. Header: step; workers, all that send a part."""
        step, workers = request.header["step"], request.header["workers"]
        for shard, part in parts:
            steps = self._steps.setdefault(shard.spec.name, _ShardSteps())
            steps.accumulate(step, request.worker, _own(part), workers)
        request.reply()

    def squares(self, request: Request) -> None:
        """Reply with the square of the norm of each tensor's sum, float64 [names], when all parts are here.

        Header: step, names, workers.
        """
        step, names, workers = request.header["step"], request.header["names"], request.header["workers"]
        shards = [self._shards[name] for name in names]
        steps = [self._steps.setdefault(name, _ShardSteps()) for name in names]

        def try_to_answer() -> Awaited | None:
            for name, steps_of_shard in zip(names, steps, strict=True):
                if missing := steps_of_shard.missing(step, workers):
                    for worker in missing:
                        if worker in self._gone:
                            why = f"worker {worker} has gone ({self._gone[worker]})"
                            raise ValueError(f"{why} without its part of {name!r} in step {step}")
                    return missing, f"have not given their part of {name!r} in step {step}"
            squares = [
                steps_of_shard.squares_of(step, shard.values)
                for steps_of_shard, shard in zip(steps, shards, strict=True)
            ]
            request.reply({}, [torch.tensor(squares, dtype=torch.float64)])
            return None

        self._waiting.add(request, try_to_answer)

    def apply(self, request: Request) -> list[Shard]:
        """Update by the sums of a step, at the first request, and return the shards.

        Header: step; names; options of each optimizer, and scale; found_inf, whether the sums are dropped.
        """
        header = request.header
        shards = [self._shards[name] for name in header["names"]]
        for shard, options in zip(shards, header["options"], strict=True):
            total = self._steps[shard.spec.name].take_total(header["step"])
            if total is not None and not header["found_inf"]:
                shard.push("gradient", total, options)
        return shards

    def restart(self, names: Sequence[str]) -> None:
        """Forget the steps of tensors whose state was loaded, or that were freed."""
        for name in names:
            self._steps.pop(name, None)


def _own(part: Part) -> Part:
    """Return a copy of a part, in float32 if its dtype is narrower, since it is summed."""
    if part is None:
        return None
    if isinstance(part, RowGradient):
        return RowGradient(part.ids.clone(), _wide(part.rows))
    return _wide(part)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.itemsize < torch.float32.itemsize else values.dtype, copy=True)
