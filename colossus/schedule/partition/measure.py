"""Measures what the blocks of a model cost: for stages that take equally long, or equal memory."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from colossus.comm import collectives
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.context.rng_streams import RngStreams
from colossus.layers.batch_info import BatchInfo
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.pipeline_block import NamedBlock, pipeline_blocks
from colossus.layers.sharded import ShardedActivation, unwrap
from colossus.layers.tokens import local
from colossus.schedule.partition.bounds import BlockCost
from colossus.schedule.partition.partition import Partition, keep_stages_of, make_partition


def measure_blocks(
    factory: Callable[[], nn.Module],
    context: ParallelContext,
    sample: Any,
    info: BatchInfo | None = None,
    *,
    dtype: torch.dtype | None = None,
    wide_dtype: torch.dtype | None = None,
    repeats: int = 3,
) -> list[BlockCost]:
    """The cost of each block of a model, the mean over all ranks, so that they agree. All ranks must call.

    One block at a time is allocated, run forward and backward on what the blocks before it make of ``sample``, and
    freed; the model of the run, its random streams and its weights are not touched. A block's activations are the
    tensors that autograd saves in its forward, parameters excepted, and its input, which is held to the backward.

    Args:
        factory: builds the model; called once for every block.
        sample: the model's input, for one microbatch on this rank.
        info: what layers may ask about the batch.
        dtype, wide_dtype: as of `build`.
        repeats: timed runs, after one that is not timed; the fastest counts.

    Raises:
        ValueError: for a model that is no chain of blocks.
    """
    scratch = copy.copy(context)  # layers built under it share no weight store with the model of the run
    scratch.rng = RngStreams(context.rng.seed)
    measured: list[BlockCost] = []
    x, num_blocks = sample, 1
    while len(measured) < num_blocks:
        model, partition = _build_block(factory, scratch, len(measured), dtype, wide_dtype)
        num_blocks = partition.num_stages
        with scratch, model_parallel_of(scratch).batch_scope.enter(info or BatchInfo()):
            cost, x = _measure(model, partition.blocks[len(measured)], x, context, repeats)
        measured.append(cost)
    return _mean(measured, context)


def _build_block(
    factory: Callable[[], nn.Module],
    context: ParallelContext,
    index: int,
    dtype: torch.dtype | None,
    wide_dtype: torch.dtype | None,
) -> tuple[nn.Module, Partition]:
    """The model with only block ``index`` allocated, and the partition with one stage for each block."""
    partitions: list[Partition] = []

    def prepare(model: nn.Module) -> None:
        partitions.append(_one_stage_per_block(model))
        keep_stages_of(model, partitions[0], index)

    return build(factory, context, dtype=dtype, wide_dtype=wide_dtype, prepare=prepare), partitions[0]


def _one_stage_per_block(model: nn.Module) -> Partition:
    count = len(pipeline_blocks(model))
    return make_partition(model, {stage: stage for stage in range(count)}, [1] * count)


def _measure(
    model: nn.Module, block: NamedBlock, x: Any, context: ParallelContext, repeats: int
) -> tuple[BlockCost, Any]:
    """Cost of a block, and its output for the next one."""
    device = context.device

    def call(given: Any) -> Any:
        with context.precision.autocast(device):
            return block.call(given)

    parameters = list(model.parameters())
    owned = {parameter.untyped_storage()._cdata for parameter in parameters}
    held: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        given = _as_input(x)
        out = call(given)
    for leaf in _tensors(given):
        hold(leaf)
    activation_bytes = sum(tensor.untyped_storage().nbytes() for key, tensor in held.items() if key not in owned)
    held.clear()
    _backward(out)  # of the run that is not timed
    following = tree_map(_detached, out)
    del given, out
    seconds = math.inf
    for _ in range(repeats):
        _clear_gradients(parameters)
        fresh = _as_input(x)
        _synchronize(device)
        start = time.perf_counter()
        _backward(call(fresh))
        _synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    parameter_bytes = sum(parameter.nbytes for name, parameter in model.named_parameters() if name in block.parameters)
    return BlockCost(seconds, parameter_bytes, activation_bytes), following


def _backward(out: Any) -> None:
    """Backward from ones through whatever the block returned."""
    plain = [unwrap(x, x.parallel)[0] if isinstance(x, ShardedActivation) else local(x) for x in _tensors(out)]
    roots = [leaf for leaf in plain if leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _as_input(x: Any) -> Any:
    """A block's input as its stage gets it: detached from what made it, and requiring a gradient.

    A copy: blocks may write to their input in place, which autograd forbids for a leaf.
    """

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().requires_grad_(leaf.is_floating_point()).clone()

    return tree_map(detach, x)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def _clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mean(costs: list[BlockCost], context: ParallelContext) -> list[BlockCost]:
    rows = [[cost.seconds, cost.parameter_bytes, cost.activation_bytes] for cost in costs]
    group = context.group(context.grid.names)
    total = collectives.all_reduce(torch.tensor(rows, dtype=torch.float64, device=context.device), group).wait()
    mean = (total / group.size).tolist()
    return [BlockCost(seconds, round(parameters), round(activations)) for seconds, parameters, activations in mean]
