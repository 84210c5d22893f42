"""Plays the lists of all ranks against each other: when does what start, and does it come to an end? No torch.

Two ways to treat transfers. *Overlapped*: a send starts when its rank gets there, takes time on the wire only, and
the compute action that needs it waits. *Blocking*: a send and its receive wait for each other, as they may with any
backend once buffers are full; then both ranks are held while the value travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from colossus.schedule.actions import (
    COMPUTE,
    INPUT_GRADIENT,
    SENDS,
    TRANSFERS,
    Action,
    Actions,
    has_transfers,
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


class Stuck(Exception):
    """No rank can go on, and not all are through.

    Attributes:
        heads: rank -> the index in its list at which it waits.
    """

    def __init__(self, heads: dict[int, int]) -> None:
        super().__init__(f"ranks wait for each other at {heads}")
        self.heads = heads


def play(actions: Actions, duration: Duration, *, transfer: float = 0.0, blocking: bool = False) -> list[list[Span]]:
    """The span of every action of every rank.

    In lists without any transfer, what another rank has computed is at hand when it is done.

    Raises:
        Stuck: when the ranks wait for each other for ever.
    """
    clock = _Clock(actions, duration, transfer, blocking)
    moved = True
    while moved:
        moved = False
        for rank in range(len(actions)):
            while clock.advance(rank):
                moved = True
    heads = {rank: len(clock.spans[rank]) for rank, own in enumerate(actions) if len(clock.spans[rank]) < len(own)}
    if heads:
        raise Stuck(heads)
    return clock.spans


class _Clock:
    def __init__(self, actions: Actions, duration: Duration, transfer: float, blocking: bool) -> None:
        self.actions, self.duration, self.transfer, self.blocking = actions, duration, transfer, blocking
        self.rank_of = placement(actions)
        self.last = max(self.rank_of, default=0)
        self.explicit = has_transfers(actions)
        self.spans: list[list[Span]] = [[] for _ in actions]
        self.now = [0.0] * len(actions)
        #: (what, stage, microbatch) -> when it was there, on the stage's own rank
        self.at: dict[tuple[str, int, int], float] = {}

    def advance(self, rank: int) -> bool:
        """Do the next action of ``rank`` if it can be done."""
        action = self._head(rank)
        if action is None:
            return False
        if self.blocking and action.kind in TRANSFERS:
            return self._meet(rank, action)
        ready = self._ready(action)
        if ready is None:
            return False
        start = max(self.now[rank], ready)
        end = start + self.duration(action)
        self._record(rank, action, start, end)
        if action.kind in SENDS:
            self._deliver(action, start + self.transfer)
        return True

    def _head(self, rank: int) -> Action | None:
        position = len(self.spans[rank])
        return self.actions[rank][position] if position < len(self.actions[rank]) else None

    def _ready(self, action: Action) -> float | None:
        """When everything that the action needs is there; None as long as that is not known."""
        latest = 0.0
        for need in self._needs(action):
            time = self.at.get(need)
            if time is None:
                return None
            latest = max(latest, time)
        return latest

    def _needs(self, action: Action) -> list[tuple[str, int, int]]:
        kind, stage, index = action.kind, action.stage, action.microbatch
        if kind == "forward":
            return [("input", stage, index)] if stage else []
        if kind in INPUT_GRADIENT:
            own = [("forward", stage, index)]
            return own if stage == self.last else [*own, ("gradient", stage, index)]
        if kind in ("backward_weight", "send_gradient"):
            return [("backward", stage, index)]
        return [("forward", stage, index)] if kind == "send_activation" else []

    def _meet(self, rank: int, action: Action) -> bool:
        """A send and its receive, when both ranks have come to them."""
        assert action.peer is not None
        other = self.rank_of.get(action.peer)
        mirror = action.mirror()
        if other is None or self._head(other) != mirror:
            return False
        send = action if action.kind in SENDS else mirror
        ready = self._ready(send)
        if ready is None:
            return False
        start = max(self.now[rank], self.now[other], ready)
        self._record(rank, action, start, start + self.transfer)
        self._record(other, mirror, start, start + self.transfer)
        self._deliver(send, start + self.transfer)
        return True

    def _deliver(self, send: Action, time: float) -> None:
        assert send.peer is not None
        self.at["input" if send.kind == "send_activation" else "gradient", send.peer, send.microbatch] = time

    def _record(self, rank: int, action: Action, start: float, end: float) -> None:
        self.spans[rank].append(Span(action, start, end))
        self.now[rank] = end
        if action.kind not in COMPUTE or action.kind == "backward_weight":
            return
        forward = action.kind == "forward"
        self.at["forward" if forward else "backward", action.stage, action.microbatch] = end
        neighbour = action.stage + (1 if forward else -1)
        if not self.explicit or self.rank_of.get(neighbour) == rank:
            self.at["input" if forward else "gradient", neighbour, action.microbatch] = end
