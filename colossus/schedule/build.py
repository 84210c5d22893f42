"""The construction of a schedule: its compute actions are checked, and transfers and reductions are added. No torch.

A schedule gives the compute actions of each rank in order. Transfers, reductions and the step are derived here, and
nowhere else.

Blocking sends cannot deadlock if all ranks follow one common order of all events, in which a transfer is one event of
its two ranks: then both ranks of the next event have come to it. Playing the compute actions gives each one a time. A
transfer gets the time at which its value is made. Sorting by time gives such an order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from colossus.registry import SCHEDULES
from colossus.schedule.actions import LAST_USE, Action, Actions, Kind, made_by, needs, placement
from colossus.schedule.check import check
from colossus.schedule.simulate import Span

#: a function of (stages, microbatches, **options) that returns the most activations that each rank may store
Bound = Callable[..., list[int]]
ScheduleFunction = TypeVar("ScheduleFunction", bound=Callable[..., object])


def make_schedule(kind: str | Callable[..., Actions], stages: int, microbatches: int, /, **options: Any) -> Actions:
    """Return the list of actions of every rank.

    Args:
        kind: a registered name, or a function (stages, microbatches, **options) that returns the compute actions of
            each rank.
        stages: the number of ranks of the pipeline.
        microbatches: the number of microbatches of a step.
        options: further arguments of the schedule, such as ``chunks``.

    Raises:
        ValueError: no schedule has the name, or the schedule is wrong (see `check`).
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
    if not is_list or len(lists) != stages or not all(isinstance(action, Action) for own in lists for action in own):
        raise ValueError(f"schedule {name} must return a list of Action(kind, stage, microbatch) for each rank")
    compute = [list(own) for own in lists]
    try:
        spans = check(compute, microbatches, bound(stages, microbatches, **options) if bound else None)
    except ValueError as error:
        raise ValueError(f"schedule {name} (stages={stages}, microbatches={microbatches}): {error}") from None
    return complete(spans)


def require_counts(**counts: int) -> None:
    """Raise ValueError unless each argument is a whole number of at least 1; the error names the first that is not."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def bounded(bound: Bound) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Decorate a schedule with the most activations that its ranks may store; `check` refuses a list that stores more.

    ``bound`` takes the same arguments as the schedule and returns a number for each rank.
    """

    def attach(schedule: ScheduleFunction) -> ScheduleFunction:
        schedule.in_flight = bound  # type: ignore[attr-defined]
        return schedule

    return attach


def complete(spans: Sequence[Sequence[Span]]) -> Actions:
    """Add transfers, reductions and the step to lists of compute actions.

    A stage's gradients are reduced as soon as they are complete, to overlap with the actions that follow.

    Args:
        spans: the actions of each rank, played with any times above zero (`check`).
    """
    rank_of = placement([[span.action for span in own] for own in spans])
    last_stage = max(rank_of)
    made_at = {made_by(span.action): span.end for own in spans for span in own}
    # for each rank, its actions with their places in the common order: (time, whether it computes, ...), so that
    # transfers come before compute actions that start at the same time. For transfers (whether the boundary between the
    # stages is odd, boundary, whether it is a gradient, microbatch) follows, so that neighbouring ones form no chain
    events: list[list[tuple[tuple[float, bool, bool, int, bool, int], Action]]] = [[] for _ in spans]
    for rank, own in enumerate(spans):
        last_of_stage = {span.action.stage: index for index, span in enumerate(own) if span.action.kind in LAST_USE}
        for index, span in enumerate(own):
            action = span.action
            events[rank].append(((span.start, True, False, index, False, 0), action))
            if last_of_stage.get(action.stage) == index:
                events[rank].append(((span.end, True, False, index, False, 0), Action("reduce", action.stage)))
            for need in needs(action, last_stage):
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
