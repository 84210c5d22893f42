"""Regions of a step: calls that have a name, and the part of the step to which their time belongs.

They are marked where the calls are written. Unless a profile runs in this process (`profiled`) a mark costs a look at
one variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

from colossus.comm.pending import Pending, Ready
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext

#: the part of a step that is in no region
REST = "rest"
#: the part of a step in which weights are gathered; collectives inside of such a region belong to it
GATHERS = "gathers"
PIPELINE_IDLE, OPTIMIZER, DATA_WAIT = "pipeline idle", "optimizer", "data wait"

P = ParamSpec("P")
R = TypeVar("R")
#: returns the name and the part of a region for the arguments of a call; None if the call is no region
Describe = Callable[..., tuple[str, str] | None]


class StepProfile(Protocol):
    """A profile: `colossus.monitor.timed_regions.TimedRegions`."""

    def region(self, name: str, part: str) -> AbstractContextManager[None]: ...

    def batch_is_here(self) -> None: ...


#: the profile that runs in this process
_current: StepProfile | None = None


@contextmanager
def profiled(profile: StepProfile) -> Iterator[None]:
    """Give all regions of a block to a profile."""
    global _current
    before, _current = _current, profile
    try:
        yield
    finally:
        _current = before


def batch_is_here() -> None:
    """End the wait for the batch of a step."""
    if _current is not None:
        _current.batch_is_here()


def region(name: str, part: str) -> AbstractContextManager[None]:
    """Count a block as a region."""
    return nullcontext() if _current is None or torch.compiler.is_compiling() else _current.region(name, part)


def timed(describe: Describe, *, starts: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count the calls of a function as regions.

    Args:
        describe: returns name and part of a call.
        starts: whether the function starts work that its result waits for (a `Pending`, or a function); a call is two
            regions, ``<name>: start`` and ``<name>: wait``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or _current is None or (described := describe(*args, **kwargs)) is None:
                return function(*args, **kwargs)
            name, part = described
            with _current.region(f"{name}: start" if starts else name, part):
                result = function(*args, **kwargs)
            return cast(R, _waiting(result, f"{name}: wait", part)) if starts else result

        return call

    return decorate


def in_region(name: str, part: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count all calls of a function as one region."""
    return timed(lambda *_, **__: (name, part))


def _waiting(started: Any, name: str, part: str) -> Any:
    """Return the result of a call so that waiting for it is a region."""
    if isinstance(started, Ready):
        return started
    finish = started.wait if isinstance(started, Pending) else started

    def wait() -> Any:
        with region(name, part):
            return finish()

    return Pending(wait) if isinstance(started, Pending) else wait


# -- parts ------------------------------------------------------------------------------------------------


def over(axes: str) -> str:
    """Return the part of a step that is spent in communication over these axes.

    Communication that includes the pipeline axis is idle time: it sends little and waits for the last stage.
    """
    return PIPELINE_IDLE if "pipeline" in axes.split("x") else f"over {axes}"


def over_replicas(context: ParallelContext) -> str:
    """Return the part of a step in which a strategy works."""
    return "over data" if context.size("data") > 1 else REST


def collective(operation: str) -> Describe:
    """Return what describes a collective by its group, which is one of its arguments."""

    def describe(*args: Any, **kwargs: Any) -> tuple[str, str] | None:
        group = next(value for value in (*args, *kwargs.values()) if isinstance(value, AxisGroup))
        return (f"{operation} over {group}", over(str(group))) if group.size > 1 else None

    return describe
