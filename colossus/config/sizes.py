"""The arithmetic of a plan: its sizes against each other, the batch and the number of processes; plans that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from colossus.arithmetic import factors, not_a_multiple
from colossus.config.schema import Config, Parallel
from colossus.registry import TENSOR_MODES

Sizes = tuple[int, int, int, int]


def world_size(parallel: Parallel) -> int:
    """Number of processes of a plan whose data size is known."""
    assert parallel.data is not None
    return parallel.data * parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size


def describe_sizes(parallel: Parallel) -> str:
    """``data 2 x pipeline 2 x tensor 4``: data when it is given, the others when they are not 1."""
    sizes = {"pipeline": parallel.pipeline.size, "sequence": parallel.sequence.size, "tensor": parallel.tensor.size}
    data = {} if parallel.data is None else {"data": parallel.data}
    return factors({**data, **{name: size for name, size in sizes.items() if size > 1}}) or "1"


def describe_zero(parallel: Parallel) -> str:
    """``ZeRO 3 in groups of 4, offloaded``; nothing without it."""
    zero = parallel.zero
    if not zero.stage:
        return ""
    groups = f" in groups of {zero.shard}" if zero.shard is not None and zero.shard != parallel.data else ""
    return f"ZeRO {zero.stage}{groups}{', offloaded' if zero.offload else ''}"


def describe_processes(count: int | None) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def mode_problems(parallel: Parallel) -> list[str]:
    tensor = parallel.tensor
    mode = TENSOR_MODES.get(tensor.mode)
    try:
        mode.axis_sizes(tensor.size, tensor.depth, tensor.shape)
    except ValueError as error:
        return [f"parallel.tensor: {error}"]
    if tensor.depth not in (None, 1) and "depth" not in mode.axes:
        return [f"parallel.tensor.depth = {tensor.depth} means nothing in mode {tensor.mode}; it is for mode 2.5d"]
    if tensor.sequence_sharded and not mode.splits_tokens:
        return [
            f"parallel.tensor.sequence_sharded means nothing in mode {tensor.mode}, whose activations between blocks "
            f"are split already; it is for mode 1d"
        ]
    return []


def shard_problems(parallel: Parallel) -> list[str]:
    shard, data = parallel.zero.shard, parallel.data or 1
    if shard is None or data % shard == 0:
        return []
    return [
        f"parallel.zero.shard = {shard} does not divide data {data}: groups of {shard} data ranks hold one copy each"
    ]


def batch_problems(config: Config, parallel: Parallel) -> list[str]:
    batch, microbatches, tensor = config.train.global_batch_size, config.schedule.microbatches, parallel.tensor
    assert parallel.data is not None
    mode = TENSOR_MODES.get(tensor.mode)
    ways = 1 if mode_problems(parallel) else mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
    divisor = parallel.data * microbatches * ways
    problems = []
    if batch % divisor:
        by = f"data {parallel.data} x microbatches {microbatches}"
        if ways > 1:
            by += f" x {ways} (shards into which tensor mode {tensor.mode} splits a batch)"
        problems.append(not_a_multiple("train.global_batch_size", batch, f"{by} = {divisor}", divisor))
    eval_batch = config.train.eval_batch_size
    if eval_batch is not None and eval_batch % parallel.data:
        problems.append(not_a_multiple("train.eval_batch_size", eval_batch, f"data {parallel.data}", parallel.data))
    return problems


# -- plans that fit -------------------------------------------------------------------------------------------


def suggestions(config: Config, options: Any, nproc: int, fits: bool) -> str:
    """Lines to put below a problem: the nearest plans for this number of processes.

    Args:
        fits: whether the plan of the config is for as many processes.
    """
    plans = nearest_plans(config, options, nproc)
    if plans:
        out = f"\n  nearest plans that fit {describe_processes(nproc)}:" + "".join(f"\n    {plan}" for plan in plans)
    else:
        out = f"\n  no plan of these axes fits {describe_processes(nproc)}, this model and this batch"
    if not fits and config.parallel.data is not None:
        wanted = world_size(config.parallel)
        out += f"\n  or keep the plan and start {describe_processes(wanted)} (--nproc {wanted})"
    return out


def nearest_plans(config: Config, options: Any, nproc: int, most: int = 4) -> list[str]:
    """Plans for ``nproc`` processes that fit model and batch, nearest first, as the overrides to type.

    Only axes that the config uses already are varied: data and tensor always, pipeline and sequence when not 1.
    """
    parallel = config.parallel
    now: Sizes = (parallel.data or 0, parallel.pipeline.size, parallel.sequence.size, parallel.tensor.size)
    keys = ("parallel.data", "parallel.pipeline.size", "parallel.sequence.size", "parallel.tensor.size")

    def distance(sizes: Sizes) -> tuple[float, int]:
        # A derived data size (0) is free: it is not the user's choice.
        ratios = [abs(math.log2(new / old)) for new, old in zip(sizes, now, strict=True) if old]
        return round(sum(ratios), 9), sum(ratio > 0 for ratio in ratios)

    found: list[str] = []
    for sizes in sorted(_factorisations(nproc, now), key=distance):
        if sizes == now or len(found) == most:
            continue
        data, pipeline, sequence, tensor = sizes
        candidate = parallel.model_copy(
            update={
                "data": data,
                "pipeline": parallel.pipeline.model_copy(update={"size": pipeline}),
                "sequence": parallel.sequence.model_copy(update={"size": sequence}),
                "tensor": parallel.tensor.model_copy(update={"size": tensor}),
            }
        )
        if mode_problems(candidate) or shard_problems(candidate) or batch_problems(config, candidate):
            continue
        if options is not None and options.check(candidate):
            continue
        changed = [f"{key}={new}" for key, new, old in zip(keys, sizes, now, strict=True) if old and new != old]
        if changed:
            found.append(" ".join(changed))
    return found


def _factorisations(nproc: int, now: Sizes) -> Iterator[Sizes]:
    small = [n for n in range(1, math.isqrt(nproc) + 1) if nproc % n == 0]
    divisors = sorted({*small, *(nproc // n for n in small)})
    for tensor in divisors:
        for sequence in divisors if now[2] > 1 else [1]:
            for pipeline in divisors if now[1] > 1 else [1]:
                data, rest = divmod(nproc, tensor * sequence * pipeline)
                if not rest:
                    yield data, pipeline, sequence, tensor
