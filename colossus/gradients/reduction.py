"""Gradients summed over ranks while backward runs, and tied ones over the stages that share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from colossus.gradients.axes import gradient_sum_axes
from colossus.gradients.bucket_sum import BucketSum, FlatSum, SumFactory
from colossus.gradients.buckets import LocalSum, first_of_each
from colossus.gradients.parts import ModelParts
from colossus.gradients.stage_buckets import StageBuckets
from colossus.gradients.tied import TiedGradients
from colossus.layout.split_parameter import as_shards


class GradientReduction:
    """One all-reduce per bucket of gradients, started as soon as backward has filled it.

    Buckets start in the same order on all ranks, whatever order their gradients are made in (as in torch's DDP,
    2006.15704), and only once the last backward of the step for their parameters has begun.

    In each step, for the stages of this rank in the order of their reductions: `arm`, the stage's last backward,
    `start`; then `finish` once, after which every gradient is the sum over ``axes``.

    Args:
        parts: the model and what it shares with other stages.
        axes: over which gradients are summed at most: all of the context, or those inside of a replica. Of a gradient
            they are those over which it is a partial sum.
        sum_of: how a bucket is summed over its axes; by default by one all-reduce.
    """

    def __init__(self, parts: ModelParts, axes: Sequence[str], sum_of: SumFactory | None = None) -> None:
        context = parts.context
        self._frozen = [param for param in parts.model.parameters() if not param.requires_grad]

        def axes_of(param: nn.Parameter) -> tuple[str, ...]:
            return tuple(axis for axis in gradient_sum_axes(param, context) if axis in axes)

        def flat_sum(params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
            return FlatSum(context.group(axes))

        limit = int(parts.bucket_mb * 2**20)
        self._buckets = {
            stage: StageBuckets(params, context, limit, axes_of, sum_of or flat_sum, self._on_gradient)
            for stage, params in parts.parameters_by_stage.items()
        }
        self._tied = TiedGradients(parts.tied, context)
        self._order = list(parts.parameters_by_stage)
        #: the stage whose last backward has begun
        self._armed: int | None = None
        #: number of stages whose buckets have all been started in this step
        self._num_started = 0

    def arm(self, stage: int) -> None:
        """The backward that follows is a stage's last of the step: reduce the buckets that it fills."""
        if any(param.requires_grad for param in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the engine was made is trainable now: its gradient would not be "
                "summed over the ranks, and the optimizer does not have it. Unfreeze it while the model is built, or "
                "make a new engine"
            )
        self._buckets[stage].prepare()
        self._armed = stage

    def start(self, stage: int) -> None:
        """Start the reductions of a stage that have not been started, without waiting for any."""
        assert stage == self._order[self._num_started], "stages are reduced in their order"
        self._buckets[stage].start_rest()
        self._armed = None
        self._num_started += 1

    def finish(self) -> None:
        """Wait until every gradient is summed; then sum those of tied parameters."""
        for buckets in self._buckets.values():
            buckets.finish()
        self._num_started = 0
        self._tied.sum()

    def abandon(self) -> None:
        """Forget a step that failed, without a collective."""
        self._armed, self._num_started = None, 0
        for buckets in self._buckets.values():
            buckets.reset()

    def close(self) -> None:
        """Between steps: look at no more gradients. Another object sums them from now on."""
        for buckets in self._buckets.values():
            buckets.close()

    def local_sums(self) -> list[LocalSum]:
        """Of each piece of gradients that this rank put into the collectives of the last step.

        A parameter is in one piece: that of the first collective, before which its gradient is this rank's own.
        """
        own = [one for buckets in self._buckets.values() for one in buckets.local_sums()]
        return first_of_each([*own, *self._tied.local_sums()])

    def _on_gradient(self, param: nn.Parameter) -> None:
        # while a stage before this one has buckets to start, these wait for their turn: `start` takes them then
        if self._armed is not None and self._armed == self._order[self._num_started]:
            with as_shards():
                self._buckets[self._armed].take(param)
