"""Is a schedule right? Complete, in order, free of deadlock, and within its memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from colossus.schedule.actions import (
    KINDS,
    TRANSFERS,
    Action,
    Actions,
    in_flight,
    made_by,
    needs,
    placement,
    receive_of,
)
from colossus.schedule.simulate import Deadlock, play


def check(actions: Actions, microbatches: int, bound: Sequence[int] | None = None) -> None:
    """Refuse full lists that would compute the wrong thing, hang, or hold too much.

    Sends block until they are received here: a schedule that passes needs no buffers, and values between two ranks
    arrive in the order in which they are received.

    Args:
        bound: the most activations that each rank may hold (see `in_flight`); None sets no bound.

    Raises:
        ValueError: naming the first bad action, its rank, its index in the rank's list, and what to do.
    """
    check_order(actions, microbatches)
    try:
        play(actions, lambda action: 0.0, blocking=True)
    except Deadlock as deadlock:
        raise ValueError(explain_deadlock(actions, deadlock.waiting_at)) from None
    if bound is not None and len(bound) != len(actions):
        raise ValueError(f"the bound on activations in flight has {len(bound)} numbers for {len(actions)} ranks")
    for rank, most in enumerate(bound or ()):
        for index, held in enumerate(in_flight(actions[rank])):
            if held > most:
                raise ValueError(
                    f"{_where(rank, index, actions[rank][index])} makes {held} activations in flight, and the schedule "
                    f"promises at most {most}; put a backward before it"
                )


def check_order(actions: Actions, microbatches: int, *, is_full: bool = True) -> None:
    """Each microbatch passes each stage once; what an action needs from its own rank comes before it.

    Args:
        is_full: the lists hold transfers, reductions and the step, too, rather than compute actions only.

    Raises:
        ValueError: naming the first bad action of the lowest rank, its index, and what to do.
    """
    for rank, own in enumerate(actions):
        for index, action in enumerate(own):
            if problem := _malformed(action, microbatches):
                raise ValueError(f"{_where(rank, index, action)}: {problem}")
    rank_of = placement(actions)
    if not rank_of:
        raise ValueError("no rank computes anything: a schedule holds a list of actions for each rank")
    if missing := sorted(set(range(max(rank_of) + 1)) - rank_of.keys()):
        raise ValueError(f"no rank has stage {missing[0]} of {max(rank_of) + 1}: give it to one")
    for rank, own in enumerate(actions):
        for index, action in enumerate(own):
            if problem := _misplaced(action, rank, rank_of):
                raise ValueError(f"{_where(rank, index, action)}: {problem}")
    if idle := sorted(set(range(len(actions))) - set(rank_of.values())):
        raise ValueError(f"rank {idle[0]} of {len(actions)} has no stage: give it one, or use fewer ranks")
    for rank, own in enumerate(actions):
        _RankList(rank, own, rank_of, microbatches, is_full).check()


def _where(rank: int, index: int, action: object) -> str:
    """``rank 1, action 5 (forward of microbatch 2 on stage 1)``."""
    return f"rank {rank}, action {index} ({action})"


def _malformed(action: object, microbatches: int) -> str | None:
    """What is wrong with an action, wherever it is."""
    if not isinstance(action, Action) or action.kind not in KINDS:
        return f"no action; make it with Action(kind, stage, microbatch), kind one of {', '.join(KINDS)}"
    if not isinstance(action.stage, int) or action.stage < 0:
        return f"a stage is a whole number from 0, got {action.stage!r}"
    if not isinstance(action.microbatch, int) or not 0 <= action.microbatch < microbatches:
        return f"there are {microbatches} microbatches, from 0; drop it"
    if action.kind in ("reduce", "step") and (action.microbatch or (action.kind == "step" and action.stage)):
        return (
            f"a {action.kind} is for all microbatches{' and stages' if action.kind == 'step' else ''}; leave them out"
        )
    if action.kind not in TRANSFERS:
        return None if action.peer is None else "only sends and receives have a peer; leave it out"
    peer = action.stage + (1 if action.kind in ("send_activation", "receive_gradient") else -1)
    return None if action.peer == peer else f"the stage at the other end is {peer}: peer={peer}"


def _misplaced(action: Action, rank: int, rank_of: dict[int, int]) -> str | None:
    """What is wrong with an action on this rank."""
    if action.kind != "step" and rank_of.get(action.stage) != rank:
        place = f"on rank {rank_of[action.stage]}" if action.stage in rank_of else "computed by no rank"
        return f"stage {action.stage} is {place}; drop it, or move the stage as a whole"
    if action.peer is not None and rank_of.get(action.peer, rank) == rank:
        return f"stage {action.peer} is {'on this rank' if action.peer in rank_of else 'no stage'}; drop it"
    return None


class _RankList:
    """The list of one rank, read from its start."""

    def __init__(self, rank: int, own: list[Action], rank_of: dict[int, int], microbatches: int, is_full: bool) -> None:
        self.rank, self.own, self.rank_of = rank, own, rank_of
        self.microbatches, self.is_full = microbatches, is_full
        self.stages = sorted(stage for stage, holder in rank_of.items() if holder == rank)
        self.last_stage = max(rank_of)
        #: of the actions read so far
        self.index_of: dict[Action, int] = {}
        self._present = frozenset(own)

    def check(self) -> None:
        for index, action in enumerate(self.own):
            if Action("step") in self.index_of:
                self._fail(index, "comes after the step, which is the last action; move it before")
            first = self.index_of.get(self._done_as(action))
            if first is not None:
                self._fail(index, f"is done already by action {first}; drop one of them")
            for need in self._needs_here(action):
                if need not in self.index_of:
                    self._fail(index, f"needs the {need} before it, {self._where_is(need, index)}")
            self.index_of[action] = index
        for action in self._required():
            if action not in self.index_of and self._done_as(action) not in self.index_of:
                raise ValueError(f"rank {self.rank}, end of the list (action {len(self.own)}): no {action}; add it")

    def _fail(self, index: int, problem: str) -> NoReturn:
        raise ValueError(f"{_where(self.rank, index, self.own[index])} {problem}")

    def _where_is(self, need: Action, index: int) -> str:
        if need in self.own:
            return f"which is action {self.own.index(need, index)}; swap them"
        return "which is missing; add it"

    def _done_as(self, action: Action) -> Action:
        """The action read so far that leaves nothing to do for this one: a backward is either full or split."""
        full = Action("backward", action.stage, action.microbatch)
        inputs = Action("backward_input", action.stage, action.microbatch)
        if action.kind == "backward" and inputs in self.index_of:
            return inputs
        return full if action.kind in ("backward_input", "backward_weight") and full in self.index_of else action

    def _needs_here(self, action: Action) -> Iterator[Action]:
        """What the action needs, as the list of this rank holds it: what comes from another rank is its receive."""
        if action.kind == "reduce":
            for microbatch in range(self.microbatches):
                yield self._backwards(action.stage, microbatch)[-1]
        elif action.kind == "step" and self.is_full:
            yield from (Action("reduce", stage) for stage in self.stages)
        for need in needs(action, self.last_stage):
            if self.rank_of[need.stage] != self.rank:
                if self.is_full:
                    yield receive_of(need, action)
            elif need.kind == "backward":
                yield self._backwards(need.stage, need.microbatch)[0]
            else:
                yield need

    def _backwards(self, stage: int, microbatch: int) -> list[Action]:
        """The backward of a stage of this rank: one action, or two where the list splits it."""
        split = [Action("backward_input", stage, microbatch), Action("backward_weight", stage, microbatch)]
        return [Action("backward", stage, microbatch)] if self._present.isdisjoint(split) else split

    def _required(self) -> Iterator[Action]:
        """Everything that the list must hold."""
        for stage in self.stages:
            for microbatch in range(self.microbatches):
                yield Action("forward", stage, microbatch)
                yield from self._backwards(stage, microbatch)
                if self.is_full:
                    yield from self._transfers(stage, microbatch)
            if self.is_full:
                yield Action("reduce", stage)
        if self.is_full:
            yield Action("step")

    def _transfers(self, stage: int, microbatch: int) -> Iterator[Action]:
        if self.rank_of.get(stage + 1, self.rank) != self.rank:
            yield Action("send_activation", stage, microbatch, stage + 1)
            yield Action("receive_gradient", stage, microbatch, stage + 1)
        if self.rank_of.get(stage - 1, self.rank) != self.rank:
            yield Action("send_gradient", stage, microbatch, stage - 1)
            yield Action("receive_activation", stage, microbatch, stage - 1)


def explain_deadlock(actions: Actions, waiting_at: dict[int, int]) -> str:
    """The error for lists that have come to a halt: the ranks that wait for each other, beginning with the first.

    Args:
        actions: lists that `check_order` has passed.
        waiting_at: rank -> index of the action at which it waits, of all ranks that are not through.
    """
    rank_of = placement(actions)
    waiting = {rank: actions[rank][index] for rank, index in waiting_at.items()}

    def awaited(rank: int) -> Action:
        """What a compute action lacks: all that it needs from its own rank is done."""
        action = waiting[rank]
        return next(need for need in needs(action, max(rank_of)) if rank_of[need.stage] != rank)

    path: list[int] = []
    rank = min(waiting)
    while rank not in path:  # a rank that waits waits for one that waits
        path.append(rank)
        peer = waiting[rank].peer
        rank = rank_of[peer if peer is not None else awaited(rank).stage]
    cycle = path[path.index(rank) :]
    first = cycle.index(min(cycle))
    cycle = cycle[first:] + cycle[:first]
    places = [_where(rank, waiting_at[rank], waiting[rank]) for rank in cycle]
    if all(waiting[rank].kind in TRANSFERS for rank in cycle):
        circle = ", which waits for ".join([*places[1:], f"rank {cycle[0]}"])
        return (
            f"{places[0]} waits for ever for {circle}. A send ends when it is received: let one of them come after "
            f"what the other waits for, or leave out all sends and receives, and they are put in"
        )
    need = awaited(cycle[0])
    rank = rank_of[need.stage]
    index, action = next((index, action) for index, action in enumerate(actions[rank]) if made_by(action) == need)
    behind = _where(rank, waiting_at[rank], waiting[rank])
    return (
        f"{places[0]} waits for ever for the {action}: rank {rank} has it as action {index}, behind {behind}; "
        f"move one of the two"
    )
