"""Simulates a schedule: plays the lists of all ranks against each other, given the time of each kind of action.

Two ways to treat transfers. *Overlapped*: a send starts when its rank gets there, takes time on the wire only, and
the compute action that needs it waits. *Blocking*: a send and its receive wait for each other, as they may with any
backend once buffers are full; then both ranks are held while the value is transferred. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from colossus.schedule.actions import (
    COMPUTE,
    SENDS,
    TRANSFERS,
    Action,
    Actions,
    in_flight,
    made_by,
    needs,
    placement,
)

#: seconds (or any unit) of an action
Duration = Callable[[Action], float]


@dataclass(frozen=True)
class Span:
    """An action and when it ran, in the unit of the durations."""

    action: Action
    start: float
    end: float


class Deadlock(Exception):
    """No rank can go on, and not all are through.

    Attributes:
        waiting_at: rank -> the index in its list at which it waits.
    """

    def __init__(self, waiting_at: dict[int, int]) -> None:
        super().__init__(f"ranks wait for each other at {waiting_at}")
        self.waiting_at = waiting_at


@dataclass(frozen=True)
class Times:
    """How long actions take, in any one unit.

    Attributes:
        backward: a full backward.
        backward_input: the dgrad of a split backward.
        backward_weight: the wgrad of a split backward.
        transfer: a value on the wire between two ranks.
        stages: a factor on the compute actions of each stage; None is 1 for all.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    stages: Sequence[float] | None = None

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in (*sorted(COMPUTE), "transfer")}
        for name, value in [*named.items(), *(("stages", factor) for factor in self.stages or ())]:
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}: a time is a finite number of at least 0, got {value!r}")

    def of(self, action: Action) -> float:
        """The time for which the action holds its rank."""
        if action.kind not in COMPUTE:
            return 0.0  # of a transfer only the wire takes time
        return float(getattr(self, action.kind) * (self.stages[action.stage] if self.stages is not None else 1.0))


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
    def peaks(self) -> list[int]:
        """For each rank the most activations in flight: microbatches times stages of the rank."""
        return [max(in_flight([span.action for span in own])) for own in self.spans]


def simulate(actions: Actions, times: Times | None = None, *, blocking: bool = False) -> Simulation:
    """Play the lists of `make_schedule`.

    Args:
        blocking: a send and its receive hold both their ranks; by default transfers overlap with computing.

    Raises:
        ValueError: when ``times.stages`` has another length than the schedule has stages.
    """
    times = times or Times()
    num_stages = len(placement(actions))
    if times.stages is not None and len(times.stages) != num_stages:
        raise ValueError(f"times.stages has {len(times.stages)} factors for {num_stages} stages")
    return Simulation(play(actions, times.of, transfer=times.transfer, blocking=blocking))


def play(actions: Actions, duration: Duration, *, transfer: float = 0.0, blocking: bool = False) -> list[list[Span]]:
    """The span of every action of every rank.

    In lists without any transfer, what one rank has computed is at once on all others.

    Raises:
        Deadlock: when the ranks wait for each other for ever.
    """
    player = _Player(actions, duration, transfer, blocking)
    moved = True
    while moved:
        moved = False
        for rank in range(len(actions)):
            while player.advance(rank):
                moved = True
    waiting_at = {
        rank: len(player.spans[rank]) for rank, own in enumerate(actions) if len(player.spans[rank]) < len(own)
    }
    if waiting_at:
        raise Deadlock(waiting_at)
    return player.spans


class _Player:
    """How far each rank has come, and which results are on which rank since when."""

    def __init__(self, actions: Actions, duration: Duration, transfer: float, blocking: bool) -> None:
        self.actions, self.duration, self.transfer, self.blocking = actions, duration, transfer, blocking
        self.rank_of = placement(actions)
        self.last_stage = max(self.rank_of, default=0)
        self.has_transfers = any(action.kind in TRANSFERS for own in actions for action in own)
        self.spans: list[list[Span]] = [[] for _ in actions]
        self.now = [0.0] * len(actions)
        #: (what made it, rank) -> when it was on that rank
        self.available: dict[tuple[Action, int], float] = {}

    def advance(self, rank: int) -> bool:
        """Do the next action of ``rank`` if it can be done."""
        action = self._next(rank)
        if action is None:
            return False
        if self.blocking and action.kind in TRANSFERS:
            return self._meet(rank, action)
        ready = self._ready(rank, action)
        if ready is None:
            return False
        start = max(self.now[rank], ready)
        self._record(rank, action, start, start + self.duration(action))
        if action.kind in SENDS:
            self._deliver(action, start + self.transfer)
        return True

    def _next(self, rank: int) -> Action | None:
        position = len(self.spans[rank])
        return self.actions[rank][position] if position < len(self.actions[rank]) else None

    def _ready(self, rank: int, action: Action) -> float | None:
        """When everything that the action needs is there; None as long as that is not known."""
        latest = 0.0
        for need in needs(action, self.last_stage):
            # without transfers in the lists, results are kept under the rank that made them
            holder = rank if self.has_transfers else self.rank_of[need.stage]
            time = self.available.get((need, holder))
            if time is None:
                return None
            latest = max(latest, time)
        return latest

    def _meet(self, rank: int, action: Action) -> bool:
        """A send and its receive, when both ranks have come to them."""
        assert action.peer is not None
        other = self.rank_of.get(action.peer)
        mirror = action.mirror()
        if other is None or self._next(other) != mirror:
            return False
        send, sender = (action, rank) if action.kind in SENDS else (mirror, other)
        ready = self._ready(sender, send)
        if ready is None:
            return False
        start = max(self.now[rank], self.now[other], ready)
        self._record(rank, action, start, start + self.transfer)
        self._record(other, mirror, start, start + self.transfer)
        self._deliver(send, start + self.transfer)
        return True

    def _deliver(self, send: Action, time: float) -> None:
        assert send.peer is not None
        for sent in needs(send, self.last_stage):
            self.available[sent, self.rank_of[send.peer]] = time

    def _record(self, rank: int, action: Action, start: float, end: float) -> None:
        self.spans[rank].append(Span(action, start, end))
        self.now[rank] = end
        if action.kind in COMPUTE:
            self.available[made_by(action), rank] = end


def _busy(own: list[Span]) -> float:
    return sum(span.end - span.start for span in own if span.action.kind in COMPUTE)
