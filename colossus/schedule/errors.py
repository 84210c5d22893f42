"""How a schedule's errors are told: which action of which rank, and what to do. No torch."""

from __future__ import annotations

from colossus.schedule.actions import INPUT_GRADIENT, TRANSFERS, Action, Actions, placement


def where(rank: int, index: int, action: object) -> str:
    """``rank 1, action 5 (forward of microbatch 2 on stage 1)``."""
    return f"rank {rank}, action {index} ({action})"


def waits_for_ever(actions: Actions, heads: dict[int, int]) -> str:
    """The message for lists that have come to a halt: the first rank of a circle of waiting ones, and the circle.

    Args:
        heads: rank -> index at which it waits, of all ranks that are not through.
    """
    rank_of = placement(actions)

    def awaited(rank: int) -> int | None:
        action = actions[rank][heads[rank]]
        return rank_of.get(action.peer if action.peer is not None else _needed(action).stage)

    rank: int | None = min(heads)
    path: list[int] = []
    while rank is not None and rank in heads and rank not in path:
        path.append(rank)
        rank = awaited(rank)
    if rank in path:
        assert rank is not None
        path = path[path.index(rank) :]
        first = path.index(min(path))
        path = path[first:] + path[:first]
    else:
        path = path[-1:]  # it waits for what is in no list
    places = [where(rank, heads[rank], actions[rank][heads[rank]]) for rank in path]
    if all(actions[rank][heads[rank]].kind in TRANSFERS for rank in path):
        circle = ", which waits for ".join([*places[1:], f"rank {path[0]}"])
        return (
            f"{places[0]} waits for ever for {circle}. A send ends when it is received: let one of them come after "
            f"what the other waits for, or leave out all sends and receives, and they are put in"
        )
    needed = _needed(actions[path[0]][heads[path[0]]])
    return f"{places[0]} waits for ever for the {needed}: {_why(actions, heads, needed)}"


def _needed(action: Action) -> Action:
    """What a compute action that waits has not got: the same on the stage before or behind."""
    if action.kind in INPUT_GRADIENT:
        return Action(action.kind, action.stage + 1, action.microbatch)
    if action.kind == "backward_weight":
        return Action("backward_input", action.stage, action.microbatch)
    return Action("forward", action.stage - 1, action.microbatch)


def _why(actions: Actions, heads: dict[int, int], needed: Action) -> str:
    kinds = INPUT_GRADIENT if needed.kind in INPUT_GRADIENT else {needed.kind}
    for rank, own in enumerate(actions):
        for index, action in enumerate(own):
            if action.kind in kinds and (action.stage, action.microbatch) == (needed.stage, needed.microbatch):
                head = where(rank, heads[rank], own[heads[rank]])
                return f"rank {rank} has it as action {index}, behind {head}; move one of the two"
    return "no rank has it; add it"
