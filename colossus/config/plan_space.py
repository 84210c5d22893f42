"""The plans of a number of processes: every choice of sizes, of microbatches and of groups of data ranks. No torch.

Whoever looks for a plan takes it from here and says what may vary: the nearest plans of an error
(`colossus.config.plans.suggestions`), the plan of a run that goes on with fewer processes
(`colossus.launch.auto_plan`), and the search of the best one (`colossus.planner.candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from colossus.arithmetic import divisors, expert_factor
from colossus.config.schema import AXES, Config, Parallel
from colossus.registry import TENSOR_MODES


def resized_plans(parallel: Parallel, processes: int, axes: Sequence[str]) -> Iterator[Parallel]:
    """Yield a plan for a number of processes with each size of some axes; data has the rest of the processes.

    Args:
        parallel: the plan.
        processes: the number of processes.
        axes: the axes whose sizes vary, out of ``pipeline``, ``sequence`` and ``tensor``; the last one varies fastest.
    """
    others = math.prod(getattr(parallel, axis).size for axis in AXES if axis != "data" and axis not in axes)
    if processes % others == 0:
        yield from _resized(parallel, processes // others, axes)


def _resized(parallel: Parallel, ranks: int, axes: Sequence[str]) -> Iterator[Parallel]:
    if not axes:
        yield parallel.model_copy(update={"data": ranks})
        return
    axis, *others = axes
    for size in divisors(ranks):
        section = getattr(parallel, axis).model_copy(update={"size": size})
        yield from _resized(parallel.model_copy(update={axis: section}), ranks // size, others)


def with_groups_of(before: Parallel, after: Parallel) -> Parallel:
    """Return a plan whose groups of data ranks (of experts, of ZeRO, of hosts) fit its data size.

    Args:
        before: the plan whose groups these are; without a number of data ranks, the groups stay.
        after: the same plan with other sizes.

    Raises:
        ValueError: the groups of experts do not fit the data size of ``before``.
    """
    expert, shard, options = before.expert.size, before.zero.shard, before.strategy.options
    hosts, per_host = options.get("hosts"), options.get("per_host")
    if before.data is None or after.data is None:
        return after
    # the consecutive ranks along data that share the experts
    neighbours = expert_factor(before.data, before.sequence.size, expert)
    num_sharing = math.gcd(neighbours, after.data)
    if expert > neighbours:
        expert = after.sequence.size * num_sharing
    elif neighbours > 1:
        expert = num_sharing
    # only what changes: a section that is not set must not become one that is
    update: dict[str, Any] = {}
    if expert != before.expert.size:
        update["expert"] = before.expert.model_copy(update={"size": expert})
    if shard is not None:
        shard = _divisor(after.data, shard, num_sharing)
        update["zero"] = before.zero.model_copy(update={"shard": shard})
    changes: dict[str, int] = {}
    if isinstance(hosts, int):
        changes["hosts"] = _divisor(after.data, hosts * after.data // before.data)
    if isinstance(per_host, int):
        changes["per_host"] = _divisor(after.data, per_host)
    if changes:
        update["strategy"] = before.strategy.model_copy(update=changes)
    return after.model_copy(update=update)


def _divisor(data: int, most: int, unit: int = 1) -> int:
    """Return the largest divisor of ``data`` that is a multiple of ``unit`` and at most ``most``; else ``unit``."""
    return max((number for number in divisors(data) if number % unit == 0 and number <= most), default=unit)


def microbatch_counts(config: Config, parallel: Parallel) -> list[int]:
    """Return the numbers of microbatches into which a plan can cut the batch of a data rank, ascending."""
    tensor, mode = parallel.tensor, TENSOR_MODES.get(parallel.tensor.mode)
    try:
        ways = mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
    except ValueError:
        return []
    samples, rest = divmod(config.train.global_batch_size, (parallel.data or 1) * ways)
    return [] if rest or not samples else divisors(samples)


def overrides_between(before: BaseModel, after: BaseModel, path: str) -> list[str]:
    """Return the overrides, ``parallel.tensor.size=2``, that turn the section at ``path`` into another one."""
    overrides = []
    for key in (*type(after).model_fields, *(after.model_extra or {})):
        old, new = getattr(before, key, None), getattr(after, key)
        if old == new:
            continue
        if isinstance(old, BaseModel) and isinstance(new, BaseModel):
            overrides += overrides_between(old, new, f"{path}.{key}")
        else:
            overrides.append(f"{path}.{key}={new if isinstance(new, str) else repr(new).replace(' ', '')}")
    return overrides
