"""One data-parallel run under a strategy, as each of its ranks has seen it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import colossus
from benchmarks.hosts import INTERFACE
from colossus.comm import accounting
from colossus.config.overrides import apply_overrides, strategy_overrides
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, fit
from colossus.engine.results import StepResult


@dataclass(frozen=True)
class Mark:
    """The end of a step on a rank.

    Attributes:
        time: monotonic seconds, of one clock for all ranks of a machine.
        counted: bytes that the rank has sent so far, as `colossus.comm.accounting` counts them.
        wire: that have left its host's link so far, headers included; 0 where it has no such link.
        waited: seconds that it has waited for peers so far, as its strategy says.
    """

    time: float
    counted: float
    wire: int
    waited: float
    loss: float


@dataclass
class RankRun:
    """A run as one rank has seen it: a mark for each step and, where there was an evaluation, its loss."""

    marks: list[Mark] = field(default_factory=list)
    validation_loss: float | None = None
    parameters: int = 0

    def seconds_per_step(self, first: int, last: int) -> float:
        """Return the seconds of a step, over those behind step ``first`` up to step ``last`` (from 1)."""
        return (self.marks[last - 1].time - self.marks[first - 1].time) / (last - first)

    def per_step(self, name: str, first: int, last: int) -> float:
        """Return what each of these steps added to a number of `Mark`."""
        return (getattr(self.marks[last - 1], name) - getattr(self.marks[first - 1], name)) / (last - first)


class _Marks(Hook):
    def __init__(self, run: RankRun, counter: accounting.Counter, on_step: Callable[[int], None] | None) -> None:
        self._run, self._counter, self._on_step, self._waited = run, counter, on_step, 0.0

    def on_step_start(self, engine: Engine) -> None:
        if self._on_step is not None:
            self._on_step(engine.completed_steps)

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        self._waited += engine.strategy.report().get("peer_wait_seconds", 0.0)
        now = time.monotonic()
        self._run.marks.append(Mark(now, self._counter.bytes(), bytes_on_wire(), self._waited, result.loss))


def bytes_on_wire() -> int:
    """Return the bytes that have left this process's host through its link so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


def train(config: Mapping[str, Any], on_step: Callable[[int], None] | None = None) -> RankRun:
    """Train to the end as the rank that the environment says.

    Args:
        on_step: called with the number of completed steps before each.
    """
    run = RankRun()
    engine = colossus.initialize(dict(config))
    run.parameters = sum(param.numel() for param in engine.strategy.trained)
    with accounting.count() as counter:
        run.validation_loss = fit(engine, [_Marks(run, counter, on_step)]).validation_loss
    engine.close()
    return run


def strategy_of(text: str) -> dict[str, Any]:
    """Return the section ``parallel.strategy`` that a text such as ``"sgp overlap=1"`` means."""
    sections = apply_overrides({}, strategy_overrides(text))
    if len(sections) > 1:
        raise ValueError(f"{text!r}: only options of the strategy can be given here")
    strategy = sections["parallel"]["strategy"]
    return strategy if isinstance(strategy, dict) else dict(type=strategy)


def rate(runs: Sequence[RankRun], first: int, last: int) -> float:
    """Return the steps per second of all replicas together."""
    return sum(1.0 / run.seconds_per_step(first, last) for run in runs)
