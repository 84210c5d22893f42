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


def plan_problems(config: Config, parallel: Parallel, options: Any) -> list[str]:
    """What of a plan whose data size is known does not fit: the tensor mode, ZeRO's groups, the model, the batch.

    Args:
        parallel: in the place of the config's.
        options: of the model, None where these are not known.
    """
    tensor, zero, train, microbatches = parallel.tensor, parallel.zero, config.train, config.schedule.microbatches
    data, problems, ways = parallel.data or 1, [], 1
    mode = TENSOR_MODES.get(tensor.mode)
    try:
        ways = mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
    except ValueError as error:
        problems.append(f"parallel.tensor: {error}")
    if tensor.depth not in (None, 1) and "depth" not in mode.axes:
        problems.append(
            f"parallel.tensor.depth = {tensor.depth} means nothing in mode {tensor.mode}; it is for mode 2.5d"
        )
    if tensor.sequence_sharded and not mode.splits_tokens:
        problems.append(
            f"parallel.tensor.sequence_sharded means nothing in mode {tensor.mode}, whose activations between blocks "
            f"are split already; it is for mode 1d"
        )
    if zero.shard is not None and data % zero.shard:
        what = f"parallel.zero.shard = {zero.shard} does not divide data {data}"
        problems.append(f"{what}: groups of {zero.shard} data ranks hold one copy each")
    if options is not None:
        problems += options.check(parallel)
    divisor = data * microbatches * ways
    if train.global_batch_size % divisor:
        by = f"data {data} x microbatches {microbatches}"
        by += f" x {ways} (shards into which tensor mode {tensor.mode} splits a batch)" if ways > 1 else ""
        batch = not_a_multiple("train.global_batch_size", train.global_batch_size, f"{by} = {divisor}", divisor)
        problems.append(batch)
    if train.eval_batch_size is not None and train.eval_batch_size % data:
        problems.append(not_a_multiple("train.eval_batch_size", train.eval_batch_size, f"data {data}", data))
    return problems


# -- plans that fit -------------------------------------------------------------------------------------------


def suggestions(config: Config, options: Any, nproc: int) -> str:
    """Lines to put below a problem: the nearest plans for this number of processes."""
    plans = nearest_plans(config, options, nproc)
    if not plans:
        return f"\n  no plan of these axes fits {describe_processes(nproc)}, this model and this batch"
    return f"\n  nearest plans that fit {describe_processes(nproc)}:" + "".join(f"\n    {plan}" for plan in plans)


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
        if len(found) == most:
            break
        data, pipeline, sequence, tensor = sizes
        candidate = parallel.model_copy(
            update={
                "data": data,
                "pipeline": parallel.pipeline.model_copy(update={"size": pipeline}),
                "sequence": parallel.sequence.model_copy(update={"size": sequence}),
                "tensor": parallel.tensor.model_copy(update={"size": tensor}),
            }
        )
        if plan_problems(config, candidate, options):
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
