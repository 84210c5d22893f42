"""The check of a schedule: that it is complete, in order, free of deadlock and within its memory. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from colossus.schedule.actions import COMPUTE, Action, Actions, in_flight, made_by, needs, placement
from colossus.schedule.simulate import Deadlock, Span, Times, play


def check(actions: Actions, microbatches: int, bound: Sequence[int] | None = None) -> list[list[Span]]:
    """Play compute actions that are complete, can run in their order, and fit in the memory bound.

    The error names the first bad action, its rank, its index in the rank's list, and what to do.

    Args:
        actions: the compute actions of each rank.
        microbatches: the number of microbatches of a step.
        bound: the most activations that each rank may store (see `in_flight`); None sets no bound.

    Returns:
        The span of each action, in the default `Times`.

    Raises:
        ValueError: they are not.
    """
    _require_complete(actions, microbatches)
    try:
        spans = play(actions, Times().of)
    except Deadlock as deadlock:
        raise ValueError(_explain(actions, deadlock.waiting_at)) from None
    for rank, limit in enumerate(bound or ()):
        for index, count in enumerate(in_flight(actions[rank])):
            if count > limit:
                raise ValueError(
                    f"{_where(rank, index, actions[rank][index])} makes {count} activations in flight, and the "
                    f"schedule promises at most {limit}; put a backward before it"
                )
    return spans


def _require_complete(actions: Actions, microbatches: int) -> None:
    """Raise ValueError unless each microbatch passes each stage forward and backward exactly once, on one rank.

    Every rank must have a stage.
    """
    rank_of = placement(actions)
    #: (half of the work, stage, microbatch) -> index of the action that does it
    done_by: dict[tuple[str, object, object], int] = {}
    for rank, own in enumerate(actions):
        for index, action in enumerate(own):
            problem = _malformed(action, microbatches)
            if problem is None and rank_of[action.stage] != rank:
                problem = f"stage {action.stage} is on rank {rank_of[action.stage]}; drop it, or move the stage"
            if problem:
                raise ValueError(f"{_where(rank, index, action)}: {problem}")
            for half in ("backward_input", "backward_weight") if action.kind == "backward" else (action.kind,):
                first = done_by.setdefault((half, action.stage, action.microbatch), index)
                if first != index:
                    raise ValueError(
                        f"{_where(rank, index, action)} is done already by action {first}; drop one of them"
                    )
    if idle := sorted(set(range(len(actions))) - set(rank_of.values())):
        raise ValueError(f"rank {idle[0]} of {len(actions)} has no stage: give it one, or use fewer ranks")
    if lacking := sorted(set(range(max(rank_of) + 1)) - rank_of.keys()):
        raise ValueError(f"no rank has stage {lacking[0]} of {max(rank_of) + 1}: give it to one")
    for stage, rank in sorted(rank_of.items()):
        for microbatch in range(microbatches):
            halves = ("forward", "backward_input", "backward_weight")
            missing = [kind for kind in halves if (kind, stage, microbatch) not in done_by]
            if missing:
                kind = "backward" if missing == ["backward_input", "backward_weight"] else missing[0]
                lacks = Action(kind, stage, microbatch)  # type: ignore[arg-type]
                raise ValueError(f"rank {rank}: no {lacks}; add it")


def _malformed(action: Action, microbatches: int) -> str | None:
    """Return what is wrong with an action by itself, or None."""
    if action.kind not in COMPUTE or action.peer is not None:
        return (
            f"a schedule returns compute actions only ({', '.join(sorted(COMPUTE))}); sends, receives, reductions and "
            f"the step are added to it"
        )
    if not isinstance(action.stage, int) or action.stage < 0:
        return f"a stage is a whole number from 0, got {action.stage!r}"
    if not isinstance(action.microbatch, int) or not 0 <= action.microbatch < microbatches:
        return f"there are {microbatches} microbatches, from 0; drop it"
    return None


def _where(rank: int, index: int, action: Action) -> str:
    """Return ``rank 1, action 5 (forward of microbatch 2 on stage 1)``."""
    return f"rank {rank}, action {index} ({action})"


def _explain(actions: Actions, waiting_at: dict[int, int]) -> str:
    """Return the message for complete lists whose ranks wait for each other.

    Args:
        actions: the compute actions of each rank.
        waiting_at: rank -> index of the action at which it waits, for all ranks that are not through.
    """
    rank_of = placement(actions)
    not_done = {made_by(action) for rank, index in waiting_at.items() for action in actions[rank][index:]}
    deadlock = ""
    for rank, index in sorted(waiting_at.items()):
        waits = actions[rank][index]
        need = next(need for need in needs(waits, max(rank_of)) if need in not_done)
        holder = rank_of[need.stage]
        at, needed = next((at, action) for at, action in enumerate(actions[holder]) if made_by(action) == need)
        if holder == rank:  # the root cause: others wait for this rank, or for each other
            return f"{_where(rank, index, waits)} needs the {needed} before it, which is action {at}; swap them"
        blocker = _where(holder, waiting_at[holder], actions[holder][waiting_at[holder]])
        deadlock = deadlock or (
            f"{_where(rank, index, waits)} waits for ever for the {needed}: rank {holder} has it as action {at}, "
            f"behind {blocker}; move one of the two"
        )
    return deadlock
