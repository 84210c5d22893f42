"""Calls that are regions of a profile. They are wrapped while one runs; outside of a profile they are untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch

from colossus.comm import collectives, uneven
from colossus.comm.links import Incoming, Links
from colossus.comm.peers import PeerLinks
from colossus.comm.pending import Pending, Ready
from colossus.context.groups import AxisGroup
from colossus.data_parallel.zero.flat_rows import FlatRows
from colossus.data_parallel.zero.sharded_block import ShardedBlock
from colossus.engine.optimizer_step import OptimizerStep
from colossus.monitor.timed_regions import GATHERS, REST, Regions
from colossus.schedule.executor import Executor
from colossus.server.rpc_client import Handle
from colossus.tensor_parallel.gathered_weights import GatheredWeights

#: parts of a step beside those over axes (`over`), in the order of tables
BEFORE_AXES = ("forward", "backward", "wgrad")
PIPELINE_IDLE, OPTIMIZER, DATA_WAIT = "pipeline idle", "optimizer", "data wait"
AFTER_AXES = (GATHERS, PIPELINE_IDLE, OPTIMIZER, DATA_WAIT, REST)

#: kind of an action -> its name, and its part of a step
_ACTIONS = {
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "backward_input": ("backward of inputs", "backward"),
    "backward_weight": ("wgrad", "wgrad"),
}


def over(axes: str) -> str:
    """Return the part of a step that is spent in communication over these axes.

    Communication that includes the pipeline axis is idle time: it sends little and waits for the last stage.
    """
    return PIPELINE_IDLE if "pipeline" in axes.split("x") else f"over {axes}"


class Point(NamedTuple):
    """A call that is a region.

    Attributes:
        owner: module, class or object that has the function.
        name: name of the function.
        describe: returns the name and the part of the region for the arguments of a call; None if the call is no
            region.
        starts: whether the call starts work that its result waits for; it is two regions, ``<name>: start`` and
            ``<name>: wait``.
    """

    owner: Any
    name: str
    describe: Callable[..., tuple[str, str] | None]
    starts: bool = False


def points(engine: Any) -> list[Point]:
    """Return all calls that are regions for an engine."""
    strategy_part = "over data" if engine.context.size("data") > 1 else REST

    def collective(operation: str) -> Callable[..., tuple[str, str] | None]:
        def describe(*args: Any, **kwargs: Any) -> tuple[str, str] | None:
            group = next(value for value in (*args, *kwargs.values()) if isinstance(value, AxisGroup))
            return (f"{operation} over {group}", over(str(group))) if group.size > 1 else None

        return describe

    def action(executor: Any, action: Any, state: Any) -> tuple[str, str] | None:
        if action.kind == "reduce":
            return f"sums of gradients stage {action.stage}", strategy_part
        if action.kind not in _ACTIONS:
            return None
        name, part = _ACTIONS[action.kind]
        return f"{name} stage {action.stage} microbatch {action.microbatch}", part

    def send(links: Any, to: int, tensors: Any, label: str, key: object = None) -> tuple[str, str]:
        return f"send of the {label}", f"over {links._group}"

    def exchange(links: Any, to: int, source: int, tensors: Any, label: str) -> tuple[str, str]:
        return f"exchange of the {label}", f"over {links._group}"

    def weight(weights: Any, weight: Any, plan: Any, dtype: Any) -> tuple[str, str] | None:
        return ("gather of a weight", GATHERS) if plan.forward else None

    def always(name: str, part: str) -> Callable[..., tuple[str, str]]:
        return lambda *_, **__: (name, part)

    started = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    strategy = type(engine.strategy)
    return [
        Point(Executor, "_do", action),
        *(Point(collectives, name, collective(name), starts=True) for name in started),
        Point(collectives, "broadcast", collective("broadcast")),
        Point(uneven, "all_to_all", collective("all_to_all"), starts=True),
        Point(uneven, "all_gather", collective("all_gather"), starts=True),
        Point(uneven, "gather_filled", collective("all_gather"), starts=True),
        Point(uneven, "reduce_scatter_filled", collective("reduce_scatter"), starts=True),
        Point(Links, "send", send, starts=True),
        Point(Links, "exchange", exchange, starts=True),
        Point(Incoming, "wait", lambda message: (f"wait for the {message.label}", over(message.entry.axes))),
        Point(PeerLinks, "receive", lambda links, *_, **__: ("wait for a replica", f"over {links.group}")),
        Point(Handle, "wait", always("wait for the servers", "over servers")),
        Point(FlatRows, "start_gather", always("gather of weights: start", GATHERS)),
        Point(ShardedBlock, "_finish_gather", always("gather of weights: wait", GATHERS)),
        Point(GatheredWeights, "gather", weight, starts=True),
        *(Point(strategy, name, always(f"strategy {name}", strategy_part)) for name in _MOMENTS),
        Point(strategy, "step", always("optimizer update", OPTIMIZER)),
        Point(OptimizerStep, "run", always("optimizer step", OPTIMIZER)),
        Point(OptimizerStep, "_sum", always("gradient norm", OPTIMIZER)),
        Point(engine, "evaluate", always("evaluation", REST)),
    ]


#: methods of a strategy that are regions, beside its step
_MOMENTS = ("begin_step", "finish", "after_step")


@contextmanager
def profiled(engine: Any, regions: Regions) -> Iterator[None]:
    """Make all `points` of an engine regions inside of a block."""
    with ExitStack() as stack:
        for point in points(engine):
            original = getattr(point.owner, point.name)
            stack.enter_context(replaced(point.owner, point.name, _in_region(original, point, regions)))
        yield


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module, a class or an object inside of a block."""
    own = vars(owner).get(name)  # None: a base class has it
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _in_region(original: Callable[..., Any], point: Point, regions: Regions) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        described = None if torch.compiler.is_compiling() else point.describe(*args, **kwargs)
        if described is None:
            return original(*args, **kwargs)
        name, part = described
        with regions.region(f"{name}: start" if point.starts else name, part):
            result = original(*args, **kwargs)
        return _waiting_in_region(result, f"{name}: wait", part, regions) if point.starts else result

    return call


def _waiting_in_region(started: Any, name: str, part: str, regions: Regions) -> Any:
    """Return the result of a call (a `Pending`, or a function that waits) so that waiting for it is a region."""
    if isinstance(started, Ready):
        return started
    finish = started.wait if isinstance(started, Pending) else started

    def wait() -> Any:
        with regions.region(name, part):
            return finish()

    return Pending(wait) if isinstance(started, Pending) else wait


def in_order(parts: Sequence[str]) -> list[str]:
    """Return parts of steps in the order of tables: computation, axes by name, waits."""
    named, present = (*BEFORE_AXES, *AFTER_AXES), set(parts)
    axes = sorted(present - set(named))
    return [part for part in (*BEFORE_AXES, *axes, *AFTER_AXES) if part in present]
