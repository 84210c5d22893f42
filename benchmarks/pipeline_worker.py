"""One rank of the pipeline benchmark."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.pipeline_cases import Case, Run, Setup

#: name -> a parameter's gradient
Gradients = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Worker:
    """A case on one rank, for a `RankGroup`."""

    def __init__(self, case: Case, setup: Setup, rank: int) -> None:
        self.run: Run = case.build(setup, rank)
        self._batches = setup.workload.batches()
        self._done = 0

    def passes(self) -> tuple[float, Gradients]:
        """Sum of losses (0 where another rank has it) and gradients of the first batch."""
        loss = self.run.passes(*self._batches[0]).item()
        found = {name: param.grad for name, param in self.run.parameters().items()}
        return loss, {name: grad.numpy() for name, grad in found.items() if grad is not None}

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of each."""
        return [self.run.step(*self._next()) for _ in range(count)]

    def block(self, what: str, count: int) -> tuple[float, float]:
        """Seconds per ``passes`` or ``step``, and those of this processor.

        The first is not timed: caches hold what another case left there.
        """
        call = getattr(self.run, what)
        call(*self._next())
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            call(*self._next())
        return (time.perf_counter() - begin) / count, (time.process_time() - busy) / count

    def _next(self) -> tuple[Tensor, Tensor]:
        self._done += 1
        return self._batches[self._done % len(self._batches)]
