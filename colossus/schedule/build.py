"""A schedule by its name: its compute actions, checked, and all that follows from them put in. No torch.

Schedules say what is computed, in which order; transfers, reductions and the step are derived here, and nowhere else.

Sends that block are safe when all ranks agree on one order of everything that happens, a transfer being one event for
its two ranks: whichever event is the next in that order, both its ranks have come to it. Playing the compute actions
gives each a time, a transfer gets the time at which its value is made, and sorting by time is such an order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from colossus.registry import SCHEDULES
from colossus.schedule.actions import LAST_USE, Action, Actions, Kind, made_by, needs, placement
from colossus.schedule.check import check
from colossus.schedule.simulate import play

#: (stages, microbatches, **options of the schedule) -> the most activations that each rank may hold
Bound = Callable[..., list[int]]
ScheduleFunction = TypeVar("ScheduleFunction", bound=Callable[..., object])

#: any times above zero give a correct order; these give a good one
_TIMES = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


def make_schedule(kind: str | Callable[..., Actions], stages: int, microbatches: int, /, **options: Any) -> Actions:
    """The lists of actions of every rank.

    Args:
        kind: a registered name, or a function (stages, microbatches, **options) -> for each rank its compute actions.
        stages: number of ranks of the pipeline.
        options: further arguments of the schedule, such as ``chunks``.

    Raises:
        ValueError: when no schedule has the name, or when it is wrong (see `check`).
    """
    require_counts(stages=stages, microbatches=microbatches)
    schedule = SCHEDULES.get(kind) if isinstance(kind, str) else kind
    name = repr(kind) if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
    signature = inspect.signature(schedule)
    try:
        signature.bind(stages, microbatches, **options)
    except TypeError as error:
        raise ValueError(f"schedule {name} takes ({', '.join(signature.parameters)}): {error}") from None
    lists = schedule(stages, microbatches, **options)
    bound: Bound | None = getattr(schedule, "in_flight", None)
    is_list = isinstance(lists, list | tuple) and all(isinstance(own, list | tuple) for own in lists)
    if not is_list or len(lists) != stages or not all(isinstance(each, Action) for own in lists for each in own):
        raise ValueError(f"schedule {name} must give a list of Action(kind, stage, microbatch) for each rank")
    compute = [list(own) for own in lists]
    try:
        check(compute, microbatches, bound(stages, microbatches, **options) if bound else None)
    except ValueError as error:
        raise ValueError(f"schedule {name} (stages={stages}, microbatches={microbatches}): {error}") from None
    actions = complete(compute)
    play(actions, lambda action: 0.0, blocking=True)  # a Deadlock here would be a mistake of ours
    return actions


def require_counts(**counts: int) -> None:
    """Each is a whole number of at least 1.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def bounded(bound: Bound) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Decorator of a schedule: it is refused if a rank holds more activations than ``bound`` says.

    ``bound`` takes the same arguments as the schedule and gives a number for each rank.
    """

    def attach(schedule: ScheduleFunction) -> ScheduleFunction:
        schedule.in_flight = bound  # type: ignore[attr-defined]
        return schedule

    return attach


def complete(actions: Actions) -> Actions:
    """Lists of compute actions that `check` has passed, with transfers, reductions and the step.

    A stage's gradients are reduced as soon as they are complete, to overlap with what follows.
    """
    rank_of = placement(actions)
    spans = play(actions, lambda action: _TIMES[action.kind])
    made_at = {made_by(span.action): span.end for own in spans for span in own}
    # by rank, actions and their places in the common order: (time, whether it is of this rank alone, ...), so that
    # transfers come before compute actions that start at the same time; of transfers, (whether the boundary between the
    # stages is odd, boundary, whether it is a gradient, microbatch), so that neighbouring ones form no chain
    events: list[list[tuple[tuple[float, bool, bool, int, bool, int], Action]]] = [[] for _ in actions]
    for rank, own in enumerate(spans):
        last_of_stage = {span.action.stage: index for index, span in enumerate(own) if span.action.kind in LAST_USE}
        for index, span in enumerate(own):
            action = span.action
            events[rank].append(((span.start, True, False, index, False, 0), action))
            if last_of_stage.get(action.stage) == index:
                events[rank].append(((span.end, True, False, index, False, 0), Action("reduce", action.stage)))
            for need in needs(action, max(rank_of)):
                if rank_of[need.stage] == rank:
                    continue
                kind: Kind = "receive_activation" if need.kind == "forward" else "receive_gradient"
                receive = Action(kind, action.stage, action.microbatch, need.stage)
                boundary = min(receive.stage, need.stage)
                is_gradient = kind == "receive_gradient"
                place = made_at[need], False, boundary % 2 == 1, boundary, is_gradient, need.microbatch
                events[rank].append((place, receive))
                events[rank_of[need.stage]].append((place, receive.mirror()))
    return [[*(action for _, action in sorted(own, key=lambda pair: pair[0])), Action("step")] for own in events]
