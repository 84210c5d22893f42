"""The global batch of each step: of one size, or growing at the beginning of a run. No torch."""

from __future__ import annotations

import math
from bisect import bisect_right

from pydantic import Field

from colossus.arithmetic import either, not_a_multiple
from colossus.config.section import Count, Section


class BatchRamp(Section):
    """A global batch that grows from ``start`` to ``train.global_batch_size``."""

    #: sequences of the first step
    start: Count
    #: steps over which the batch grows, with equally many steps at each size; later it is ``global_batch_size``
    steps: Count
    #: sequences that are added at a time; by default ``start``
    increment: Count = Field(default_factory=lambda values: values["start"])

    def __str__(self) -> str:
        return f"the batch begins with {self.start} and grows by {self.increment} at a time, up to step {self.steps}"

    def require_end(self, full: int) -> None:
        """Raise ValueError unless the ramp ends at a batch of this size.

        The message has the nearest increments that do.
        """
        rest = full - self.start
        if rest <= 0:
            raise ValueError(f"batch_ramp.start = {self.start} is not below global_batch_size = {full}")
        if rest % self.increment:
            divisors = [number for number in range(1, rest + 1) if rest % number == 0]
            near = [number for number in divisors if number < self.increment][-1:]
            near += [number for number in divisors if number > self.increment][:1]
            raise ValueError(
                f"batch_ramp.increment = {self.increment} does not divide global_batch_size {full} - start "
                f"{self.start} = {rest}; nearest: {either(near)}"
            )

    def plan_problems(self, full: int, data: int, microbatches: int, ways: int) -> list[str]:
        """Return a line for each number that is no multiple of a microbatch under a plan.

        Args:
            full: size of the full batch.
            data: data ranks.
            microbatches: microbatches of a step.
            ways: shards into which a tensor mode splits a batch.
        """
        unit = full // microbatches
        by = f"data {data} x {unit // data} samples of a microbatch = {unit}"
        sizes = {"start": self.start, "increment": self.increment}
        problems = [
            not_a_multiple(f"train.batch_ramp.{key}", size, by, unit) for key, size in sizes.items() if size % unit
        ]
        if problems:
            fewest = full // math.gcd(*sizes.values())
            fit = (number for number in range(fewest, full + 1, fewest) if full % (number * data * ways) == 0)
            if number := next(fit, None):
                problems[-1] += f"\n  or keep the ramp and take smaller microbatches: schedule.microbatches={number}"
        return problems


class BatchSizes:
    """Samples of the global batch of each step, counted from 0. They depend on the config alone, not on the plan.

    Args:
        full: size of the full batch.
        ramp: the ramp; None for one size.
        shift: samples that were read beyond those of steps of these sizes, by a run that is resumed with other sizes.

    Attributes:
        full: size of the full batch.
        full_from: the first step that has it.
        all: every size, ascending.
    """

    def __init__(self, full: int, ramp: BatchRamp | None = None, shift: int = 0) -> None:
        self.full, self._shift = full, shift
        self._start, self._increment, number = full, 0, 0
        if ramp is not None:
            self._start, self._increment = ramp.start, ramp.increment
            number = (full - ramp.start) // ramp.increment
        #: the first step of each increment
        self._grows = [-(-times * ramp.steps // number) for times in range(1, number + 1)] if ramp is not None else []
        self.full_from = self._grows[-1] if self._grows else 0
        self.all = sorted({self._start, *map(self.at, self._grows)})

    def at(self, step: int) -> int:
        """Return the samples of a step."""
        return self._start + self._increment * bisect_right(self._grows, step)

    def before(self, step: int) -> int:
        """Return the samples of all steps before this one: the position in the data at which it begins."""
        grown = sum(max(0, step - first) for first in self._grows)
        return self._shift + self._start * step + self._increment * grown
