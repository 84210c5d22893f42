"""Which calls are regions of a profile: they are wrapped while one runs, and are their own selves else."""

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
BEHIND_AXES = (GATHERS, PIPELINE_IDLE, OPTIMIZER, DATA_WAIT, REST)

#: kind of an action -> its name, and its part of the step
_ACTIONS = {
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "backward_input": ("backward of inputs", "backward"),
    "backward_weight": ("wgrad", "wgrad"),
}


def over(axes: str) -> str:
    """The part of a step that is spent in communication over these axes. Where ranks of several stages meet, what is
    sent is little, and they wait for the last of them.
    """
    return PIPELINE_IDLE if "pipeline" in axes.split("x") else f"over {axes}"


class Point(NamedTuple):
    """A call that is a region.

    Attributes:
        owner, name: where the function is.
        describe: of the call's arguments the name of the region and its part; None: this call is none.
        starts: the call starts what its result waits for: two regions, ``<name>: start`` and ``<name>: wait``.
    """

    owner: Any
    name: str
    describe: Callable[..., tuple[str, str] | None]
    starts: bool = False


def points(engine: Any) -> list[Point]:
    """All of them."""
    of_strategy = "over data" if engine.context.size("data") > 1 else REST

    def collective(operation: str) -> Callable[..., tuple[str, str] | None]:
        def describe(*args: Any, **kwargs: Any) -> tuple[str, str] | None:
            group = next(each for each in (*args, *kwargs.values()) if isinstance(each, AxisGroup))
            return (f"{operation} over {group}", over(str(group))) if group.size > 1 else None

        return describe

    def action(executor: Any, action: Any, state: Any) -> tuple[str, str] | None:
        if action.kind == "reduce":
            return f"sums of gradients stage {action.stage}", of_strategy
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
        *(Point(strategy, name, always(f"strategy {name}", of_strategy)) for name in _MOMENTS),
        Point(strategy, "step", always("optimizer update", OPTIMIZER)),
        Point(OptimizerStep, "run", always("optimizer step", OPTIMIZER)),
        Point(OptimizerStep, "_sum", always("gradient norm", OPTIMIZER)),
        Point(engine, "evaluate", always("evaluation", REST)),
    ]


#: of a strategy, beside its step
_MOMENTS = ("begin_step", "finish", "after_step")


@contextmanager
def profiled(engine: Any, regions: Regions) -> Iterator[None]:
    """Inside, all `points` are regions."""
    with ExitStack() as stack:
        for point in points(engine):
            original = getattr(point.owner, point.name)
            stack.enter_context(replaced(point.owner, point.name, _in_region(original, point, regions)))
        yield


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``owner`` (a module, a class, an object) has another function of that name."""
    own = vars(owner).get(name)  # None: that of a base class
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
    """What was started (a `Pending`, or a function that waits), waited for in a region."""
    if isinstance(started, Ready):
        return started
    finish = started.wait if isinstance(started, Pending) else started

    def wait() -> Any:
        with regions.region(name, part):
            return finish()

    return Pending(wait, None) if isinstance(started, Pending) else wait


def in_order(parts: Sequence[str]) -> list[str]:
    """Parts of steps in the order of tables: what computes, axes by name, what waits."""
    named = (*BEFORE_AXES, *BEHIND_AXES)
    found = set(parts)
    axes = sorted(found - set(named))
    return [part for part in (*BEFORE_AXES, *axes, *BEHIND_AXES) if part in found]
