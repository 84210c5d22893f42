"""What a microbatch keeps for backward on each stage, and the most that its forward and its backward need: counted by
running them on fake tensors under the plan's layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from colossus.context.parallel_context import ParallelContext
from colossus.engine.inputs import Inputs, StepBatch, model_input
from colossus.engine.loss_function import LossFunction
from colossus.layers.model_parallel import model_parallel_of
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.schedule.transport import flatten_value, unflatten_value
from colossus.sharded_tensor.regions import without_sequence
from colossus.sharded_tensor.tensor import ShardedTensor


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one microbatch on one stage, beyond what is there without it.

    Attributes:
        kept: from the end of its forward to its backward.
        forward: at most during its forward.
        backward: at most during its backward, with what was kept; gradients of parameters are not counted twice.
    """

    kept: int
    forward: int
    backward: int


def run_microbatch(
    forwards: Mapping[int, Callable[[Any], Any]],
    loss_fn: LossFunction,
    batch: StepBatch,
    inputs: Inputs,
    context: ParallelContext,
    fake: CountedFakeTensors,
) -> dict[int, StageActivations]:
    """Run the first microbatch through all stages on fake tensors, forward and backward, one stage after the other.

    Args:
        forwards: stage -> what runs it, of all stages of the model.
        batch: of this rank, of fake tensors.
        fake: the mode under which all is made, entered.
    """
    parallel, last = model_parallel_of(context), max(forwards)
    microbatch = batch.microbatches[0]
    own = inputs.local(microbatch)
    found: dict[int, StageActivations] = {}
    passed = None
    context.rng.move_to(0, 0)
    for stage in sorted(forwards):
        before = fake.mark()
        with parallel.batch(batch.info), context.precision.autocast(context.device):
            if passed is None:
                value, roots = inputs.mark_tokens(model_input(own), microbatch), list[Tensor]()
            else:
                received = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in passed.tensors]
                value, roots = unflatten_value(passed, received, parallel)
                del received
            out = forwards[stage](value)
            del value
            if stage == last:
                out = loss_fn(tree_map_only(ShardedTensor, without_sequence, out), own)[0]
        passed, made = flatten_value(out, parallel, f"stage {stage}")
        del out
        leaves = [(x, leaf) for x, leaf in zip(made, passed.tensors, strict=True) if leaf.needs_gradient]
        edges = [get_gradient_edge(x) for x, _ in leaves]
        del made, leaves  # what is sent is no part of what is kept, unless it is saved for backward, too
        forward, kept = fake.peak - before, fake.live - before
        fake.mark()
        if edges:
            with parallel.batch(batch.info):
                seeds = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in passed.differentiable]
                torch.autograd.backward(edges, seeds)
                del seeds
        del edges, roots
        found[stage] = StageActivations(kept, forward, fake.peak - before)
    return found
