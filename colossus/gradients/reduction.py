"""Sums of gradients over ranks while backward runs, and of tied gradients over the stages that share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.gradients.bucket_sum import BucketSum, FlatSum, SumFactory
from colossus.gradients.buckets import Bucket, StageBuckets
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layout.split_parameter import as_shards
from colossus.tensor_parallel.dtypes import gradient_dtype


@dataclass(frozen=True)
class ModelParts:
    """The model of a rank as a data-parallel strategy sees it.

    Attributes:
        context: the ranks.
        model: this rank's part of the model.
        parameters_by_stage: stage of this rank -> the parameters whose gradients are complete after its last backward.
            Stages are in the order of their reductions, which is the same on all ranks that share parameters.
        tied: the parameters that several pipeline ranks hold, each with all of these; the first of them counts it in
            the gradient norm.
        bucket_mb: the MB of gradients that one collective sums.
        syncs_after: returns whether all replicas wait for each other after a number of completed steps: an evaluation
            or a checkpoint is due, or training ends.
        closing: callbacks for when the engine is closed; they remove hooks on its parameters, which would keep it in
            memory.
    """

    context: ParallelContext
    model: nn.Module
    parameters_by_stage: Mapping[int, Sequence[nn.Parameter]]
    tied: Sequence[tuple[nn.Parameter, tuple[int, ...]]]
    bucket_mb: float
    syncs_after: Callable[[int], bool] = lambda completed: False
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """The tied parameters that another pipeline rank counts in the gradient norm."""
        here = self.context.index("pipeline")
        return [param for param, ranks in self.tied if ranks[0] != here]


class GradientReduction:
    """One all-reduce per bucket of gradients, started as soon as the last backward of the step has filled it.

    From the second step on the gradients of all microbatches are added in the buckets.

    Buckets start in the same order on all ranks, whatever the order in which backward makes gradients (as in torch's
    DDP, 2006.15704). In each step, for the stages of this rank in the order of their reductions, the caller calls
    `prepare`, runs the stage's last backward, and calls `start`. After one `finish`, every gradient is the sum over
    ``axes``.

    Args:
        parts: the model of this rank.
        axes: the axes over which gradients are summed, where they are partial: all, or those inside a replica.
        sum_of: makes the sum of a bucket over its axes; by default one all-reduce.
    """

    def __init__(self, parts: ModelParts, axes: Sequence[str], sum_of: SumFactory | None = None) -> None:
        context = parts.context
        self._frozen = [param for param in parts.model.parameters() if not param.requires_grad]

        def axes_of(param: nn.Parameter) -> tuple[str, ...]:
            return tuple(axis for axis in gradient_sum_axes(param, context) if axis in axes)

        def flat_sum(params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
            return FlatSum(context.state_group(axes))

        limit = int(parts.bucket_mb * 2**20)
        self._buckets = {
            stage: StageBuckets(params, context, limit, axes_of, sum_of or flat_sum, self._on_gradient, parts.closing)
            for stage, params in parts.parameters_by_stage.items()
        }
        self._tied = TiedGradients(parts.tied, context)
        self._order = list(parts.parameters_by_stage)
        #: the stage whose last backward of the step runs
        self._current: int | None = None
        #: number of stages whose buckets have all been started in this step
        self._num_started = 0

    @property
    def has_sums(self) -> bool:
        """Return whether any gradient has axes to be summed over, as far as the stages are prepared."""
        return any(buckets.has_sums for buckets in self._buckets.values())

    def prepare(self, stage: int) -> None:
        """Prepare for a stage's last backward of the step, which follows, to start the sum of each bucket it fills."""
        if any(param.requires_grad for param in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the engine was made is trainable now: its gradient would not be "
                "summed over the ranks, and the optimizer does not have it. Unfreeze it while the model is built, or "
                "make a new engine"
            )
        self._buckets[stage].prepare()
        self._current = stage

    def start(self, stage: int) -> None:
        """Start the remaining sums of a stage, without waiting for any."""
        assert stage == self._order[self._num_started], "stages are reduced in their order"
        self._buckets[stage].start_rest()
        self._current = None
        self._num_started += 1

    def finish(self) -> None:
        """Wait until every gradient is summed; then sum those of tied parameters."""
        for buckets in self._buckets.values():
            buckets.finish()
        self._num_started = 0
        self._tied.sum()

    def _on_gradient(self, param: nn.Parameter) -> None:
        with as_shards():
            for stage, buckets in self._buckets.items():
                # a stage whose turn has not come leaves its gradients to `start_rest`
                if stage == self._current == self._order[self._num_started]:
                    buckets.take(param)
                else:
                    buckets.hold(param)


class TiedGradients:
    """The sums of the gradients of tied parameters over the pipeline ranks that share them.

    Args:
        tied: the tied parameters of this rank, each with the pipeline ranks that hold it; in the same order on all.
        context: the ranks.
    """

    def __init__(self, tied: Sequence[tuple[nn.Parameter, tuple[int, ...]]], context: ParallelContext) -> None:
        by_ranks: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for param, ranks in tied:
            if param.requires_grad:
                by_ranks.setdefault((ranks, gradient_dtype(param)), []).append(param)
        self._buckets = [
            Bucket(params, FlatSum(context.subgroup("pipeline", sorted(ranks))), context.precision.reduce_dtype(dtype))
            for (ranks, dtype), params in by_ranks.items()
        ]

    def sum(self) -> None:
        """Sum the gradients, after their sums over data ranks. Collective over the ranks that share parameters."""
        for bucket in self._buckets:
            for param in bucket.params:
                if param.grad is not None:
                    bucket.take(param)
            bucket.start()
            bucket.finish()
