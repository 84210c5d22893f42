"""Simulates a schedule: plays the lists of all ranks against each other, given the time of each kind of action.

Two ways to treat transfers. *Overlapped*: a send starts when its rank gets there, takes time on the wire only, and
the compute action that needs it waits. *Blocking*: a send and its receive wait for each other, as they may with any
backend once buffers are full; then both ranks are held while the value is transferred. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def of(self, action: Action) -> float:
        """The time for which the action holds its rank."""
        return float(getattr(self, action.kind)) if action.kind in COMPUTE else 0.0  # a transfer takes the wire alone


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
        busy = [sum(s.end - s.start for s in own if s.action.kind in COMPUTE) for own in self.spans]
        return [1.0 - each / self.makespan if self.makespan else 0.0 for each in busy]

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
    """
    times = times or Times()
    return Simulation(play(actions, times.of, transfer=times.transfer, blocking=blocking))


def play(actions: Actions, duration: Duration, *, transfer: float = 0.0, blocking: bool = False) -> list[list[Span]]:
    """The span of every action of every rank.

    In lists without any transfer, what one rank has computed is at once on all others.

    Raises:
        Deadlock: when the ranks wait for each other for ever.
    """
    rank_of = placement(actions)
    last_stage = max(rank_of, default=0)
    has_transfers = any(action.kind in TRANSFERS for own in actions for action in own)
    spans: list[list[Span]] = [[] for _ in actions]
    now = [0.0] * len(actions)
    #: (what made it, rank) -> when it was on that rank
    available: dict[tuple[Action, int], float] = {}

    def next_of(rank: int) -> Action | None:
        return actions[rank][len(spans[rank])] if len(spans[rank]) < len(actions[rank]) else None

    def ready(rank: int, action: Action) -> float | None:
        """When everything that the action needs is there; None as long as that is not known."""
        latest = 0.0
        for need in needs(action, last_stage):
            # without transfers in the lists, results are kept under the rank that made them
            at = available.get((need, rank if has_transfers else rank_of[need.stage]))
            if at is None:
                return None
            latest = max(latest, at)
        return latest

    def run(rank: int, action: Action, start: float, end: float) -> None:
        spans[rank].append(Span(action, start, end))
        now[rank] = end
        if action.kind in COMPUTE:
            available[made_by(action), rank] = end

    def deliver(send: Action, time: float) -> None:
        assert send.peer is not None
        for sent in needs(send, last_stage):
            available[sent, rank_of[send.peer]] = time

    def meet(rank: int, action: Action) -> bool:
        """A send and its receive, when both ranks have come to them."""
        assert action.peer is not None
        other, mirror = rank_of.get(action.peer), action.mirror()
        if other is None or next_of(other) != mirror:
            return False
        send, sender = (action, rank) if action.kind in SENDS else (mirror, other)
        since = ready(sender, send)
        if since is None:
            return False
        start = max(now[rank], now[other], since)
        run(rank, action, start, start + transfer)
        run(other, mirror, start, start + transfer)
        deliver(send, start + transfer)
        return True

    def advance(rank: int) -> bool:
        """Do the next action of a rank if it can be done."""
        action = next_of(rank)
        if action is None:
            return False
        if blocking and action.kind in TRANSFERS:
            return meet(rank, action)
        since = ready(rank, action)
        if since is None:
            return False
        start = max(now[rank], since)
        run(rank, action, start, start + duration(action))
        if action.kind in SENDS:
            deliver(action, start + transfer)
        return True

    ranks, moved = range(len(actions)), True
    while moved:
        moved = False
        for rank in ranks:
            while advance(rank):
                moved = True
    waiting_at = {rank: len(spans[rank]) for rank in ranks if next_of(rank) is not None}
    if waiting_at:
        raise Deadlock(waiting_at)
    return spans
