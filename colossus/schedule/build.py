"""A schedule by its name, completed and checked. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions
from colossus.schedule.check import check
from colossus.schedule.memory import Bound
from colossus.schedule.transfers import complete


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
    plan = SCHEDULES.get(kind) if isinstance(kind, str) else kind
    name = repr(kind) if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
    signature = inspect.signature(plan)
    try:
        signature.bind(stages, microbatches, **options)
    except TypeError as error:
        raise ValueError(f"schedule {name} takes ({', '.join(signature.parameters)}): {error}") from None
    made = plan(stages, microbatches, **options)
    problem = None
    if not isinstance(made, list | tuple) or not all(isinstance(own, list | tuple) for own in made):
        problem = f"gives {type(made).__name__}, not a list of actions for each rank"
    elif len(made) != stages:
        problem = f"gives lists for {len(made)} ranks, not for {stages}"
    elif strange := [item for own in made for item in own if not isinstance(item, Action)]:
        problem = f"holds {strange[0]!r}, which is no Action(kind, stage, microbatch)"
    if problem:
        raise ValueError(f"schedule {name} {problem}")
    bound: Bound | None = getattr(plan, "in_flight", None)
    try:
        actions = complete([list(own) for own in made])
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
