"""How many activations a rank holds. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from colossus.schedule.actions import LAST_USE, Action

#: (stages, microbatches, **options of the schedule) -> the most that each rank may hold
Bound = Callable[..., list[int]]
Plan = TypeVar("Plan", bound=Callable[..., object])


def in_flight(own: Sequence[Action]) -> list[int]:
    """After each action of a rank, the number of activations it holds.

    One for each stage of the rank and microbatch whose forward has begun and whose last backward (that of the weights,
    when it is in halves) has not ended.
    """
    held, out = 0, []
    for action in own:
        held += (action.kind == "forward") - (action.kind in LAST_USE)
        out.append(held)
    return out


def bounded(bound: Bound) -> Callable[[Plan], Plan]:
    """Decorator of a schedule: it is refused if a rank holds more activations than ``bound`` says.

    ``bound`` takes the same arguments as the schedule and gives a number for each rank.
    """

    def mark(plan: Plan) -> Plan:
        plan.in_flight = bound  # type: ignore[attr-defined]
        return plan

    return mark


def in_flight_of_stages(actions: Sequence[Sequence[Action]]) -> list[int]:
    """For each stage the most microbatches that it holds at a time."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in (action for own in actions for action in own):
        held[action.stage] = held.get(action.stage, 0) + (action.kind == "forward") - (action.kind in LAST_USE)
        most[action.stage] = max(most.get(action.stage, 0), held[action.stage])
    return [most[stage] for stage in sorted(most)]
