"""A schedule by its name: its lists of actions, completed and checked. No torch.

Sends that block are safe when all ranks agree on one order of everything that happens, a transfer being one event for
its two ranks: whichever event is the next in that order, both its ranks have come to it. Playing the compute actions
gives each a time, a transfer gets the time at which its value is made, and sorting by time is such an order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from colossus.registry import SCHEDULES
from colossus.schedule.actions import (
    LAST_USE,
    Action,
    Actions,
    has_transfers,
    made_by,
    needs,
    placement,
    receive_of,
)
from colossus.schedule.check import check, check_order, explain_deadlock
from colossus.schedule.simulate import Deadlock, play

#: (stages, microbatches, **options of the schedule) -> the most activations that each rank may hold
Bound = Callable[..., list[int]]
ScheduleFunction = TypeVar("ScheduleFunction", bound=Callable[..., object])

#: any times above zero give a correct order; these give a good one
_TIMES = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


def make_schedule(kind: str | Callable[..., Actions], stages: int, microbatches: int, /, **options: Any) -> Actions:
    """The lists of actions of every rank.

    Args:
        kind: a registered name, or a function (stages, microbatches, **options) -> lists, of compute actions only or
            full ones.
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
    problem = None
    if not isinstance(lists, list | tuple) or not all(isinstance(own, list | tuple) for own in lists):
        problem = f"gives {type(lists).__name__}, not a list of actions for each rank"
    elif len(lists) != stages:
        problem = f"gives lists for {len(lists)} ranks, not for {stages}"
    elif strange := [item for own in lists for item in own if not isinstance(item, Action)]:
        problem = f"holds {strange[0]!r}, which is no Action(kind, stage, microbatch)"
    if problem:
        raise ValueError(f"schedule {name} {problem}")
    bound: Bound | None = getattr(schedule, "in_flight", None)
    try:
        actions = complete([list(own) for own in lists])
        check(actions, microbatches, bound(stages, microbatches, **options) if bound else None)
    except ValueError as error:
        raise ValueError(f"schedule {name} (stages={stages}, microbatches={microbatches}): {error}") from None
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
    """The lists with what they lack: transfers if there are none at all, reductions, the step.

    Args:
        actions: for each rank its compute actions in order, or full lists, which stay as they are.

    Raises:
        ValueError: naming the first action that comes before what it needs, or waits for ever for another rank.
    """
    out = [_with_reductions(own) for own in actions]
    if not has_transfers(actions):
        microbatches = 1 + max((action.microbatch for own in actions for action in own), default=0)
        check_order(actions, microbatches, is_full=False)
        try:
            out = _with_transfers(out)
        except Deadlock as deadlock:
            # indices are those of the lists as they were given: without the reductions put in
            waiting_at = {rank: actions[rank].index(out[rank][index]) for rank, index in deadlock.waiting_at.items()}
            raise ValueError(explain_deadlock(actions, waiting_at)) from None
    step = Action("step")
    return [own if step in own else [*own, step] for own in out]


def _with_reductions(own: list[Action]) -> list[Action]:
    """With a reduction of each stage's gradients as soon as they are complete, to overlap with what follows."""
    present = {action.stage for action in own if action.kind == "reduce"}
    last = {action.stage: index for index, action in enumerate(own) if action.kind in LAST_USE}
    out = []
    for index, action in enumerate(own):
        out.append(action)
        if last.get(action.stage) == index and action.stage not in present:
            out.append(Action("reduce", action.stage))
    return out


class _Event(NamedTuple):
    """A place in the common order. Transfers come before the compute actions that start at the same time."""

    time: float
    is_local: bool
    #: boundaries between stages in two rounds, the even ones first, so that neighbouring transfers form no chain
    is_odd: bool
    boundary: int
    is_gradient: bool
    microbatch: int


def _with_transfers(actions: Actions) -> Actions:
    rank_of = placement(actions)
    spans = play(actions, lambda action: _TIMES.get(action.kind, 0.0))
    made_at = {made_by(span.action): span.end for own in spans for span in own}
    events: list[list[tuple[_Event, Action]]] = [[] for _ in actions]
    for rank, own in enumerate(spans):
        for index, span in enumerate(own):
            # sorting is stable, and the boundary of a local action is its place in the list
            events[rank].append((_Event(span.start, True, False, index, False, 0), span.action))
            for need in needs(span.action, max(rank_of)):
                if rank_of[need.stage] == rank:
                    continue
                receive = receive_of(need, span.action)
                boundary = min(receive.stage, need.stage)
                is_gradient = receive.kind == "receive_gradient"
                event = _Event(made_at[need], False, boundary % 2 == 1, boundary, is_gradient, need.microbatch)
                events[rank].append((event, receive))
                events[rank_of[need.stage]].append((event, receive.mirror()))
    return [[action for _, action in sorted(own, key=lambda pair: pair[0])] for own in events]
