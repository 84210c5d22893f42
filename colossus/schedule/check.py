"""Is a schedule right? Complete and within its memory: counted. In order and without deadlock: played. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from colossus.schedule.actions import COMPUTE, Action, Actions, in_flight, made_by, needs, placement
from colossus.schedule.simulate import Deadlock, play


def check(actions: Actions, microbatches: int, bound: Sequence[int] | None = None) -> None:
    """Refuse compute actions that would compute the wrong thing, wait for ever, or hold too much.

    Args:
        bound: the most activations that each rank may hold (see `in_flight`); None sets no bound.

    Raises:
        ValueError: naming the first bad action, its rank, its index in the rank's list, and what to do.
    """
    _require_complete(actions, microbatches)
    try:
        play(actions, lambda action: 0.0)
    except Deadlock as deadlock:
        raise ValueError(_explain(actions, deadlock.waiting_at)) from None
    for rank, most in enumerate(bound or ()):
        for index, held in enumerate(in_flight(actions[rank])):
            if held > most:
                raise ValueError(
                    f"{_where(rank, index, actions[rank][index])} makes {held} activations in flight, and the schedule "
                    f"promises at most {most}; put a backward before it"
                )


def _require_complete(actions: Actions, microbatches: int) -> None:
    """Each microbatch passes each stage, on one rank, forward and backward exactly once; every rank has a stage."""
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
    """What is wrong with an action, wherever it is."""
    if action.kind not in COMPUTE or action.peer is not None:
        return (
            f"a schedule gives compute actions only ({', '.join(sorted(COMPUTE))}); sends, receives, reductions and "
            f"the step are put in"
        )
    if not isinstance(action.stage, int) or action.stage < 0:
        return f"a stage is a whole number from 0, got {action.stage!r}"
    if not isinstance(action.microbatch, int) or not 0 <= action.microbatch < microbatches:
        return f"there are {microbatches} microbatches, from 0; drop it"
    return None


def _where(rank: int, index: int, action: Action) -> str:
    """``rank 1, action 5 (forward of microbatch 2 on stage 1)``."""
    return f"rank {rank}, action {index} ({action})"


def _explain(actions: Actions, waiting_at: dict[int, int]) -> str:
    """The error for complete lists that have come to a halt.

    Args:
        waiting_at: rank -> index of the action at which it waits, of all ranks that are not through.
    """
    rank_of = placement(actions)
    behind = {made_by(action) for rank, index in waiting_at.items() for action in actions[rank][index:]}
    others = ""
    for rank, index in sorted(waiting_at.items()):
        waits = actions[rank][index]
        need = next(need for need in needs(waits, max(rank_of)) if need in behind)
        holder = rank_of[need.stage]
        at, needed = next((at, action) for at, action in enumerate(actions[holder]) if made_by(action) == need)
        if holder == rank:  # the first cause: others wait for this rank, or for each other
            return f"{_where(rank, index, waits)} needs the {needed} before it, which is action {at}; swap them"
        blocker = _where(holder, waiting_at[holder], actions[holder][waiting_at[holder]])
        others = others or (
            f"{_where(rank, index, waits)} waits for ever for the {needed}: rank {holder} has it as action {at}, "
            f"behind {blocker}; move one of the two"
        )
    return others
