"""The simulation of a schedule: the lists of all ranks are played, with a time for each kind of action. No torch.

Transfers are simulated in one of two ways. *Overlapped*: a send starts when its rank comes to it and takes no time of
the rank; the compute action that needs the value waits for it. *Blocking*: a send and its receive wait for each other,
as they may with any backend once its buffers are full, and block both ranks while the value is transferred.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from colossus.schedule.actions import (
    COMPUTE,
    SENDS,
    TRANSFERS,
    Action,
    Actions,
    Value,
    in_flight,
    made_by,
    needs,
    placement,
)

#: a function that returns the time of an action, in any unit
Duration = Callable[[Action], float]


class Span(NamedTuple):
    """An action with its start and end, in the unit of the durations."""

    action: Action
    start: float
    end: float


class Deadlock(Exception):
    """The error of a schedule in which ranks wait for each other for ever.

    Attributes:
        waiting_at: rank -> the index in its list at which it waits.
    """

    def __init__(self, waiting_at: dict[int, int]) -> None:
        super().__init__(f"ranks wait for each other at {waiting_at}")
        self.waiting_at = waiting_at


@dataclass(frozen=True)
class Times:
    """The times of actions, in any one unit.

    Attributes:
        forward: the time of a forward.
        backward: the time of a full backward.
        backward_input: the time of the dgrad of a split backward.
        backward_weight: the time of the wgrad of a split backward.
        transfer: the time of a value on the wire between two ranks.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def of(self, action: Action) -> float:
        """Return the time that an action takes on its rank; a transfer takes time on the wire only."""
        return float(getattr(self, action.kind)) if action.kind in COMPUTE else 0.0


@dataclass(frozen=True)
class Simulation:
    """A played schedule.

    Attributes:
        spans: the actions of each rank, with start and end.
    """

    spans: list[list[Span]]

    @cached_property
    def makespan(self) -> float:
        """The time from the first action to the end of the last one."""
        return max(span.end for own in self.spans for span in own)

    @cached_property
    def bubbles(self) -> list[float]:
        """The share of the makespan in which each rank computes nothing."""
        busy = [sum(s.end - s.start for s in own if s.action.kind in COMPUTE) for own in self.spans]
        return [1.0 - time / self.makespan if self.makespan else 0.0 for time in busy]

    @property
    def bubble(self) -> float:
        """The mean of `bubbles` over the ranks."""
        return sum(self.bubbles) / len(self.bubbles)

    @cached_property
    def peaks(self) -> list[int]:
        """The most activations in flight on each rank, counted per (stage, microbatch)."""
        return [max(in_flight([span.action for span in own])) for own in self.spans]


def simulate(actions: Actions, times: Times | None = None, *, blocking: bool = False) -> Simulation:
    """Play the lists of `make_schedule`.

    Args:
        actions: the actions of each rank.
        times: the times of actions; by default, those of `Times`.
        blocking: a send and its receive block both of their ranks; by default transfers overlap with computing.
    """
    times = times or Times()
    return Simulation(play(actions, times.of, transfer=times.transfer, blocking=blocking))


def play(
    actions: Actions,
    duration: Duration,
    *,
    transfer: float = 0.0,
    blocking: bool = False,
    at_once: int | None = None,
) -> list[list[Span]]:
    """Return the span of every action of every rank.

    In lists without any transfer, the results of one rank are at once on all others.

    Args:
        actions: the actions of each rank.
        duration: the time of each action.
        transfer: the time of a value on the wire.
        blocking: a send and its receive block both of their ranks.
        at_once: so many ranks can compute at the same time, since they share cores: one that could start waits until
            another has ended an action, the one that could start first before others; None: all.

    Raises:
        Deadlock: ranks wait for each other for ever.
    """
    rank_of = placement(actions)
    last_stage = max(rank_of, default=0)
    has_transfers = any(action.kind in TRANSFERS for own in actions for action in own)
    needed = [[needs(action, last_stage) for action in own] for own in actions]
    spans: list[list[Span]] = [[] for _ in actions]
    now = [0.0] * len(actions)
    #: for each rank, the time from which a value is there, and the ranks that wait for a value on it
    available: list[dict[Value, float]] = [{} for _ in actions]
    waiting: list[dict[Value, set[int]]] = [{} for _ in actions]
    #: ranks that may be able to run their next action
    todo = [*reversed(range(len(actions)))]
    #: the times from which cores are free, a heap
    cores = [0.0] * (at_once or 0)

    def next_of(rank: int) -> Action | None:
        return actions[rank][len(spans[rank])] if len(spans[rank]) < len(actions[rank]) else None

    def ready(rank: int) -> float | None:
        """Return the time from which all that a rank's next action needs is there, or None while that is unknown."""
        latest = 0.0
        for need in needed[rank][len(spans[rank])]:
            # without transfers in the lists, values stay with the rank that made them
            at = rank if has_transfers else rank_of[need.stage]
            time = available[at].get(need)
            if time is None:
                waiting[at].setdefault(need, set()).add(rank)
                return None
            latest = max(latest, time)
        return latest

    def arrive(value: Value, rank: int, time: float) -> None:
        available[rank][value] = time
        todo.extend(waiting[rank].pop(value, ()))

    def run(rank: int, action: Action, start: float, end: float) -> None:
        spans[rank].append(Span(action, start, end))
        now[rank] = end
        if action.kind in COMPUTE:
            arrive(made_by(action), rank, end)

    def deliver(send: Action, time: float) -> None:
        assert send.peer is not None
        for sent in needs(send, last_stage):
            arrive(sent, rank_of[send.peer], time)

    def transfer_blocking(rank: int, action: Action) -> bool:
        """Run a send and its receive if both ranks have come to them, and return whether they have."""
        assert action.peer is not None
        other, mirror = rank_of.get(action.peer), action.mirror()
        if other is None or next_of(other) != mirror:
            return False
        send, sender = (action, rank) if action.kind in SENDS else (mirror, other)
        ready_at = ready(sender)
        if ready_at is None:
            return False
        start = max(now[rank], now[other], ready_at)
        run(rank, action, start, start + transfer)
        run(other, mirror, start, start + transfer)
        deliver(send, start + transfer)
        todo.append(other)
        return True

    def advance(rank: int) -> bool:
        """Run the next action of a rank if it can run, and return whether it could."""
        action = next_of(rank)
        if action is None:
            return False
        if blocking and action.kind in TRANSFERS:
            return transfer_blocking(rank, action)
        ready_at = ready(rank)
        if ready_at is None:
            return False
        start = max(now[rank], ready_at)
        if cores and action.kind in COMPUTE:
            start = max(start, cores[0])
            heapq.heapreplace(cores, start + duration(action))
        run(rank, action, start, start + duration(action))
        if action.kind in SENDS:
            deliver(action, start + transfer)
        return True

    def could_start(rank: int) -> float:
        action = next_of(rank)
        ready_at = None if action is None else ready(rank)
        return math.inf if ready_at is None else max(now[rank], ready_at)

    while todo:
        if cores:  # in the order of time, as cores are given
            todo = sorted(set(todo), key=could_start, reverse=True)
        rank = todo.pop()
        while advance(rank):
            if cores:
                todo.append(rank)
                break
    waiting_at = {rank: len(own) for rank, own in enumerate(spans) if len(own) < len(actions[rank])}
    if waiting_at:
        raise Deadlock(waiting_at)
    return spans
