"""The default strategy: gradients are all-reduced in buckets, overlapped with backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from colossus.engine.gradients.bucket_sum import BucketSum, FlatSum
from colossus.engine.gradients.buckets import LocalSum
from colossus.engine.gradients.reduction import GradientReduction
from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parts import ModelParts
from colossus.engine.strategies.strategy import Strategy


class AllReduce(Strategy):
    """Sums gradients over data ranks in the collectives that sum them over the other ranks, too.

    Exact; a subclass that is not sums them inside of the replica only.
    """

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        store.shard(())  # nothing is cut: the copies of low precision that compute takes are kept beside what is stored
        super().setup(store, parts)
        self._reduction = self.make_reduction()

    def make_reduction(self) -> GradientReduction:
        """What sums the gradients of a step."""
        return GradientReduction(self.parts, self.summed_axes, self.sum_of)

    def sum_of(self, params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
        """How the gradients of a bucket are summed over these axes."""
        return FlatSum(self.parts.context.group(axes))

    def last_backward(self, stage: int) -> None:
        self._reduction.arm(stage)

    def reduce(self, stage: int) -> None:
        self._reduction.start(stage)

    def finish(self) -> None:
        self._reduction.finish()
        self.store.accept_whole_gradients()

    def local_sums(self) -> list[LocalSum]:
        return self._reduction.local_sums()

    def abandon(self) -> None:
        self._reduction.abandon()
