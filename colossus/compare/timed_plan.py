"""The processes of a timed plan, and the report when one fails."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from colossus.checkpoint.errors import CheckpointError
from colossus.compare.bench_table import Measured
from colossus.compare.timed_steps import TimedSteps
from colossus.config import Config
from colossus.config.plans import describe_plan, world_size
from colossus.context.local_ranks import LocalRanks, RanksFailed
from colossus.launch.held_ranks import hold_ranks, threads_of


def one_thread() -> None:
    """Limit torch to one thread, before its first operation: ranks forked from a process with torch threads hang."""
    torch.set_num_threads(1)


class TimedPlan:
    """The ranks of a plan, which train in blocks until one of them fails; that is printed, not raised.

    Attributes:
        measured: the measurements so far.
    """

    def __init__(self, label: str, file: str, overrides: Sequence[str], config: Config) -> None:
        self._config, self._threads, count = config, threads_of(config), world_size(config.parallel)
        self.measured = Measured(label, describe_plan(config), count, self._threads)
        self._make = partial(TimedSteps, file, overrides, count)
        self._ranks: LocalRanks | None = None

    def start(self, stack: ExitStack, warmup: int) -> None:
        """Start the processes, which end with the stack, and run the warm-up."""

        def start() -> None:
            self._ranks = stack.enter_context(hold_ranks(self._config, self._make, self._threads))
            self._call(partial(TimedSteps.warm_up, steps=warmup))

        self._try(start)

    def block(self, steps: int) -> float:
        """Return the seconds of a step; NaN once the plan has failed."""
        if self.measured.failure is None:
            self._try(lambda: self.measured.blocks.append(self._call(partial(TimedSteps.block, steps=steps))))
        return math.nan if self.measured.failure is not None else self.measured.seconds[-1]

    def _call(self, work: Callable[[Any], Any]) -> list[Any]:
        assert self._ranks is not None
        answers = self._ranks.call("call", work)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (CheckpointError, FloatingPointError) as error:
            text = self.measured.failure = str(error)
        except RanksFailed as error:
            self.measured.failure, text = _reason(error)
        else:
            return
        print(f"colossus: {self.measured.label} failed: {text}", file=sys.stderr, flush=True)


def _reason(error: RanksFailed) -> tuple[str, str]:
    """Return one line, and the whole report, of the rank that failed by itself, not because its peer had gone."""
    own = sorted(error.tracebacks.keys() - set(error.victims))
    if not own and error.exit_codes:
        line = f"ranks ended without an answer, with exit codes {error.exit_codes}"
        return line, line
    if not error.tracebacks:
        return str(error), str(error)
    rank = (own or sorted(error.tracebacks))[0]
    text = error.tracebacks[rank]
    _, *after_last_frame = text.rpartition('\n  File "')[2].splitlines()
    message = next((line for line in after_last_frame if line[:1].strip()), "it raised")
    return f"rank {rank}: {message}", f"rank {rank}\n{text}"
