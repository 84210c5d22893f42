"""What a schedule costs, given the time of each kind of action. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from colossus.schedule.actions import COMPUTE, Action, Actions, placement
from colossus.schedule.clock import Span, play
from colossus.schedule.memory import in_flight


@dataclass(frozen=True)
class Times:
    """How long actions take, in any one unit.

    Attributes:
        backward: a backward that is not split in halves.
        transfer: a value on the wire between two ranks.
        stages: a factor on the compute actions of each stage; None is 1 for all.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    stages: Sequence[float] | None = None

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in (*sorted(COMPUTE), "transfer", "reduce", "step")}
        for name, value in [*named.items(), *(("stages", factor) for factor in self.stages or ())]:
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}: a time is a finite number of at least 0, got {value!r}")

    def of(self, action: Action) -> float:
        """The time for which the action holds its rank."""
        if action.kind in COMPUTE:
            return float(getattr(self, action.kind) * (self.stages[action.stage] if self.stages is not None else 1.0))
        return float(getattr(self, action.kind, 0.0))  # of a transfer only the wire takes time


@dataclass(frozen=True)
class Simulation:
    """When everything ran, and what follows from that.

    Attributes:
        spans: for each rank its actions with start and end.
    """

    spans: list[list[Span]]

    @cached_property
    def makespan(self) -> float:
        """From the first action to the end of the last one."""
        return max(span.end for own in self.spans for span in own)

    @cached_property
    def bubbles(self) -> list[float]:
        """For each rank the share of the makespan in which it computes nothing."""
        return [1.0 - busy / self.makespan if self.makespan else 0.0 for busy in map(_busy, self.spans)]

    @property
    def bubble(self) -> float:
        """The mean over the ranks."""
        return sum(self.bubbles) / len(self.bubbles)

    @cached_property
    def memory(self) -> list[list[tuple[float, int]]]:
        """For each rank (time, activations in flight from then on), where the number changes."""
        return [_curve(own) for own in self.spans]

    @cached_property
    def peaks(self) -> list[int]:
        """For each rank the most activations in flight: microbatches times stages of the rank."""
        return [max(in_flight([span.action for span in own])) for own in self.spans]


def simulate(actions: Actions, times: Times | None = None, *, blocking: bool = False) -> Simulation:
    """Play full lists that have passed the checker.

    Transfers overlap with computing: a send leaves when its rank comes to it, and only the action that needs the value
    waits. With ``blocking``, a send and its receive hold both their ranks.

    Raises:
        ValueError: when ``times.stages`` has another length than the schedule has stages.
    """
    times = times or Times()
    stages = len(placement(actions))
    if times.stages is not None and len(times.stages) != stages:
        raise ValueError(f"times.stages has {len(times.stages)} factors for {stages} stages")
    return Simulation(play(actions, times.of, transfer=times.transfer, blocking=blocking))


def _busy(own: list[Span]) -> float:
    return sum(span.end - span.start for span in own if span.action.kind in COMPUTE)


def _curve(own: list[Span]) -> list[tuple[float, int]]:
    curve: list[tuple[float, int]] = [(0.0, 0)]
    for span, held in zip(own, in_flight([span.action for span in own]), strict=True):
        if held == curve[-1][1]:
            continue
        time = span.start if held > curve[-1][1] else span.end
        if curve[-1][0] == time:
            curve.pop()
        if not curve or curve[-1][1] != held:
            curve.append((time, held))
    return curve
