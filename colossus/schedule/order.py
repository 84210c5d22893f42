"""What each rank's list must hold, and in which order: every action once, after what it needs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from colossus.schedule.actions import INPUT_GRADIENT, KINDS, TRANSFERS, Action, Actions, Kind, placement
from colossus.schedule.errors import where


def check_order(actions: Actions, microbatches: int, *, explicit: bool = True) -> None:
    """Each microbatch passes each stage once; what an action needs from its own rank comes before it.

    Args:
        explicit: the lists hold transfers, reductions and the step, too, rather than compute actions only.

    Raises:
        ValueError: naming the first bad action of the lowest rank, its index, and what to do.
    """
    for rank, own in enumerate(actions):
        for index, action in enumerate(own):
            if problem := _malformed(action, microbatches):
                raise ValueError(f"{where(rank, index, action)}: {problem}")
    rank_of = placement(actions)
    if not rank_of:
        raise ValueError("no rank computes anything: a schedule holds a list of actions for each rank")
    if missing := sorted(set(range(max(rank_of) + 1)) - rank_of.keys()):
        raise ValueError(f"no rank has stage {missing[0]} of {max(rank_of) + 1}: give it to one")
    for rank, own in enumerate(actions):
        for index, action in enumerate(own):
            if problem := _misplaced(action, rank, rank_of):
                raise ValueError(f"{where(rank, index, action)}: {problem}")
    if idle := sorted(set(range(len(actions))) - set(rank_of.values())):
        raise ValueError(f"rank {idle[0]} of {len(actions)} has no stage: give it one, or use fewer ranks")
    for rank, own in enumerate(actions):
        _Walk(rank, own, rank_of, microbatches, explicit).run()


def _malformed(action: object, microbatches: int) -> str | None:
    """What is wrong with an action as it stands."""
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
        home = f"on rank {rank_of[action.stage]}" if action.stage in rank_of else "computed by no rank"
        return f"stage {action.stage} is {home}; drop it, or move the stage as a whole"
    if action.peer is not None and rank_of.get(action.peer, rank) == rank:
        return f"stage {action.peer} is {'on this rank' if action.peer in rank_of else 'no stage'}; drop it"
    return None


class _Walk:
    """Reads the list of one rank from its start."""

    def __init__(self, rank: int, own: list[Action], rank_of: dict[int, int], microbatches: int, explicit: bool):
        self.rank, self.own, self.rank_of = rank, own, rank_of
        self.microbatches, self.explicit = microbatches, explicit
        self.stages = sorted(stage for stage, home in rank_of.items() if home == rank)
        self.last = max(rank_of)
        self.index_of: dict[Action, int] = {}
        self._present = frozenset(own)

    def run(self) -> None:
        for index, action in enumerate(self.own):
            if Action("step") in self.index_of:
                self._fail(index, "comes after the step, which is the last action; move it before")
            first = self.index_of.get(self._once(action))
            if first is not None:
                self._fail(index, f"is done already by action {first}; drop one of them")
            for need in self._needs(action):
                if need not in self.index_of:
                    self._fail(index, f"needs the {need} before it, {self._where_is(need, index)}")
            self.index_of[action] = index
        for action in self._wanted():
            if action not in self.index_of and self._once(action) not in self.index_of:
                raise ValueError(f"rank {self.rank}, end of the list (action {len(self.own)}): no {action}; add it")

    def _fail(self, index: int, problem: str) -> None:
        raise ValueError(f"{where(self.rank, index, self.own[index])} {problem}")

    def _where_is(self, need: Action, index: int) -> str:
        if need in self.own:
            return f"which is action {self.own.index(need, index)}; swap them"
        return "which is missing; add it"

    def _once(self, action: Action) -> Action:
        """The action that stands for this one in "done once": a backward may be whole or in halves."""
        whole = Action("backward", action.stage, action.microbatch)
        inputs = Action("backward_input", action.stage, action.microbatch)
        if action.kind == "backward" and inputs in self.index_of:
            return inputs
        return whole if action.kind in ("backward_input", "backward_weight") and whole in self.index_of else action

    def _needs(self, action: Action) -> Iterator[Action]:
        kind, stage, index = action.kind, action.stage, action.microbatch
        if kind == "forward" and stage > 0:
            yield from self._from(stage - 1, Action("forward", stage - 1, index), "receive_activation", action)
        elif kind in INPUT_GRADIENT:
            yield Action("forward", stage, index)
            if stage < self.last:
                yield from self._from(stage + 1, self._backward(stage + 1, index), "receive_gradient", action)
        elif kind == "backward_weight":
            yield Action("backward_input", stage, index)
        elif kind == "send_activation":
            yield Action("forward", stage, index)
        elif kind == "send_gradient":
            yield self._backward(stage, index)
        elif kind == "reduce":
            yield from (self._backward(stage, number, weights=True) for number in range(self.microbatches))
        elif kind == "step" and self.explicit:
            yield from (Action("reduce", stage) for stage in self.stages)

    def _from(self, stage: int, local: Action, receive: Kind, action: Action) -> Iterator[Action]:
        """What brings a value from a neighbouring stage to this rank."""
        if self.rank_of[stage] == self.rank:
            yield local
        elif self.explicit:
            yield Action(receive, action.stage, action.microbatch, stage)

    def _backward(self, stage: int, microbatch: int, weights: bool = False) -> Action:
        """The backward of a stage of this rank, in the form that the list has it."""
        inputs, parameters = Action("backward_input", stage, microbatch), Action("backward_weight", stage, microbatch)
        if self._present.isdisjoint((inputs, parameters)):
            return Action("backward", stage, microbatch)
        return parameters if weights else inputs

    def _wanted(self) -> Iterator[Action]:
        """Everything that the list must hold; in lists of compute actions only these."""
        for stage in self.stages:
            for index in range(self.microbatches):
                yield Action("forward", stage, index)
                backward = self._backward(stage, index)
                yield backward
                if backward.kind == "backward_input":
                    yield Action("backward_weight", stage, index)
                if self.explicit:
                    yield from self._transfers(stage, index)
            if self.explicit:
                yield Action("reduce", stage)
        if self.explicit:
            yield Action("step")

    def _transfers(self, stage: int, microbatch: int) -> Iterator[Action]:
        if self.rank_of.get(stage + 1, self.rank) != self.rank:
            yield Action("send_activation", stage, microbatch, stage + 1)
            yield Action("receive_gradient", stage, microbatch, stage + 1)
        if self.rank_of.get(stage - 1, self.rank) != self.rank:
            yield Action("send_gradient", stage, microbatch, stage - 1)
            yield Action("receive_activation", stage, microbatch, stage - 1)
