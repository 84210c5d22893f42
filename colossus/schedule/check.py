"""Is a schedule right? Complete, in order, free of deadlock, and within its memory. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from colossus.schedule.actions import Actions
from colossus.schedule.clock import Stuck, play
from colossus.schedule.errors import waits_for_ever, where
from colossus.schedule.memory import in_flight
from colossus.schedule.order import check_order


def check(actions: Actions, microbatches: int, bound: Sequence[int] | None = None) -> None:
    """Refuse full lists that would compute the wrong thing, hang, or hold too much.

    Sends block until they are received: a schedule that passes needs no buffers, and values between two ranks
    arrive in the order in which they are awaited.

    Args:
        bound: the most activations that each rank may hold (see `in_flight`); None sets no bound.

    Raises:
        ValueError: naming the first bad action, its rank, its index in the rank's list, and what to do.
    """
    check_order(actions, microbatches)
    try:
        play(actions, lambda action: 0.0, blocking=True)
    except Stuck as stuck:
        raise ValueError(waits_for_ever(actions, stuck.heads)) from None
    if bound is not None and len(bound) != len(actions):
        raise ValueError(f"the bound on activations in flight has {len(bound)} numbers for {len(actions)} ranks")
    for rank, most in enumerate(bound or ()):
        for index, held in enumerate(in_flight(actions[rank])):
            if held > most:
                raise ValueError(
                    f"{where(rank, index, actions[rank][index])} makes {held} activations in flight, and the schedule "
                    f"promises at most {most}; put a backward before it"
                )
