"""Synchronous steps at a server: parts of gradients, the squares of their sums, one update; and requests that wait.

A sum is the same whatever comes first: parts are added up in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.frames import Request
from colossus.server.shard import Part, Shard, parts_of

#: what a request waits for: workers, and in words
Awaited = tuple[list[int], str]


@dataclass(frozen=True)
class _Deferred:
    request: Request
    look: Callable[[], bool]
    awaited: Callable[[], Awaited]


class WaitingRequests:
    """Requests that are answered when something that others do has come about."""

    def __init__(self) -> None:
        self._deferred: list[_Deferred] = []

    def of(self, worker: int) -> list[Awaited]:
        """What each request of a worker waits for."""
        return [deferred.awaited() for deferred in self._deferred if deferred.request.worker == worker]

    def add(self, request: Request, look: Callable[[], bool], awaited: Callable[[], Awaited]) -> None:
        """Answer a request, at once where it can be.

        Args:
            look: answers it, unless it is too early (False); a ValueError of it refuses the request.
            awaited: what it waits for while it is not answered.
        """
        deferred = _Deferred(request, look, awaited)
        if not self._is_over(deferred):
            self._deferred.append(deferred)

    def drop(self, worker: int) -> None:
        """A worker has gone."""
        for deferred in [deferred for deferred in self._deferred if deferred.request.worker == worker]:
            self._deferred.remove(deferred)
            deferred.request.fail(f"worker {worker} has gone")

    def look_again(self) -> None:
        """Something has changed. What an answer changes is looked at, too."""
        while over := [deferred for deferred in self._deferred if self._is_over(deferred)]:
            self._deferred = [deferred for deferred in self._deferred if deferred not in over]

    @staticmethod
    def _is_over(deferred: _Deferred) -> bool:
        try:
            return deferred.look()
        except ValueError as error:
            deferred.request.fail(str(error))
        except Exception as error:  # a header that no worker of ours sends
            deferred.request.fail(f"{deferred.request.op}: {type(error).__name__}: {error}")
        return True


class GradientSum:
    """Parts of the gradient of one shard in one step.

    Args:
        workers: who gives a part each, ascending.
    """

    def __init__(self, workers: Sequence[int]) -> None:
        self.workers = list(workers)
        self._parts: dict[int, Part] = {}
        self._dense: Tensor | None = None
        self._num_added = 0

    def add(self, worker: int, part: Part) -> None:
        """Take a part, whose tensors are this object's from then on. Dense parts of all workers before the first that
        is missing are added at once, so that they can be freed; rows are added at the end."""
        if worker not in self.workers:
            raise ValueError(f"worker {worker} is none of those that take part: {self.workers}")
        if worker in self._parts:
            raise ValueError(f"worker {worker} has given its part already")
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


class _ShardSteps:
    """The newest step of one shard, and what was asked of the one before.

    Attributes:
        step: the newest that somebody has given a part of; older ones are over.
        sum: of it.
        total: the sum, once it is complete and was asked for.
        squares: of its norm, by step: of this one and of those applied before.
        applied: the newest step that was applied.
    """

    def __init__(self) -> None:
        self.step = self.applied = -1
        self.sum = GradientSum(())
        self.total: Part = None
        self.squares: dict[int, float] = {}

    def accumulate(self, step: int, worker: int, part: Part, workers: Sequence[int]) -> None:
        if step < self.step or step in self.squares or step <= self.applied:
            raise ValueError(f"worker {worker} gives a part of step {step}, whose sum was taken already")
        if step > self.step:  # one before it that was not applied has failed
            self.step, self.sum, self.total = step, GradientSum(workers), None
            self.squares = {number: kept for number, kept in self.squares.items() if number == self.applied}
        self.sum.add(worker, part)

    def missing(self, step: int, workers: Sequence[int]) -> list[int]:
        """Who has not given a part of a step yet."""
        if step in self.squares or step < self.step:
            return []
        return self.sum.missing() if step == self.step else list(workers)

    def squares_of(self, step: int, like: Tensor) -> float:
        """The square of the norm of the sum, of a step of which nothing is missing."""
        if step not in self.squares:
            if step != self.step:
                raise ValueError(f"step {step} was applied already, and a newer one after it")
            self.total = self.sum.total(like)
            self.squares[step] = _squares(self.total)
        return self.squares[step]

    def require_total(self, step: int) -> Part:
        """The sum that is to be applied now; None: it is nothing, or was applied before."""
        if step <= self.applied:
            return None
        if step != self.step or step not in self.squares:
            raise ValueError(f"step {step} is to be applied before the squares of its sums were taken")
        return self.total


class SyncSteps:
    """Requests of synchronous steps at one server.

    Args:
        shards: by name.
        gone: workers that have ended, and why.
    """

    def __init__(self, shards: Mapping[str, Shard], waiting: WaitingRequests, gone: Mapping[int, str]) -> None:
        self._shards, self._waiting, self._gone = shards, waiting, gone
        self._steps: dict[str, _ShardSteps] = {}

    def accumulate(self, request: Request) -> None:
        """Parts of a step. Header: step, names, kinds, workers (who take part)."""
        header = request.header
        found = list(parts_of(self._shards, header["names"], header["kinds"], request.arrays))
        for shard, part in found:
            shard.check("gradient", part, {"lr": 0.0})
        for shard, part in found:
            steps = self._steps.setdefault(shard.spec.name, _ShardSteps())
            steps.accumulate(header["step"], request.worker, _own(part), header["workers"])
        request.reply()

    def squares(self, request: Request) -> None:
        """Of each tensor the square of the norm of the sum over workers, answered when all parts are here. Header:
        step, names, workers. The reply: one array, float64 [names]."""
        step, names, workers = request.header["step"], request.header["names"], request.header["workers"]
        shards = [self._shards[name] for name in names]
        steps = [self._steps.setdefault(name, _ShardSteps()) for name in names]

        def missing() -> Iterator[tuple[str, list[int]]]:
            return ((name, of.missing(step, workers)) for name, of in zip(names, steps, strict=True))

        def look() -> bool:
            for name, those in missing():
                for worker in those:
                    if worker in self._gone:
                        why = f"worker {worker} has gone ({self._gone[worker]})"
                        raise ValueError(f"{why} without its part of {name!r} in step {step}")
                if those:
                    return False
            found = [of.squares_of(step, shard.values) for of, shard in zip(steps, shards, strict=True)]
            request.reply({}, [torch.tensor(found, dtype=torch.float64)])
            return True

        def awaited() -> Awaited:
            late = {name: those for name, those in missing() if those}
            workers = sorted({worker for those in late.values() for worker in those})
            return workers, f"have not given their part of {next(map(repr, late), 'any tensor')} in step {step}"

        self._waiting.add(request, look, awaited)

    def apply(self, request: Request) -> list[Shard]:
        """Update by the sums of a step, once, whoever asks first. Header: step, names, options (for each: of the
        optimizer, and scale), found_inf: the sums are dropped. What one tensor refuses changes none, and no sum is
        taken."""
        header = request.header
        step, shards, totals = header["step"], [self._shards[name] for name in header["names"]], []
        for shard, options in zip(shards, header["options"], strict=True):
            if shard.spec.name not in self._steps:
                raise ValueError(
                    f"step {step} of {shard.spec.name!r} is to be applied, and nobody has given a part of it"
                )
            totals.append(self._steps[shard.spec.name].require_total(step))
            if totals[-1] is not None and not header["found_inf"]:
                shard.check("gradient", totals[-1], options)
        for shard, total, options in zip(shards, totals, header["options"], strict=True):
            if total is not None and not header["found_inf"]:
                shard.push("gradient", total, options)
            steps = self._steps[shard.spec.name]
            if step > steps.applied:
                steps.applied, steps.total, steps.sum = step, None, GradientSum(())
        return shards

    def restart(self, names: Sequence[str]) -> None:
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
