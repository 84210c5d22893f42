"""The arithmetic of a plan: its sizes against each other, the batch and the number of processes. No torch."""

from __future__ import annotations

from colossus.arithmetic import factors, not_a_multiple
from colossus.config.schema import Config, Parallel
from colossus.registry import TENSOR_MODES


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
