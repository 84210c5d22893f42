"""The model of a rank as a data-parallel strategy sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from colossus.context.parallel_context import ParallelContext


@dataclass(frozen=True)
class ModelParts:
    """What a strategy is set up with.

    Attributes:
        model: this rank's part of it.
        parameters_by_stage: stage of this rank -> the parameters whose gradients are complete with it, in the order in
            which stages are reduced: the same on all ranks that share them.
        tied: the parameters that other pipeline ranks hold, too, each with all that do; the first of these counts it
            in the gradient norm.
        bucket_mb: how many MB of gradients one collective takes.
        syncs_after: whether all replicas wait for each other after so many completed steps: because of an evaluation
            or a checkpoint that is due, or since they are the last.
    """

    context: ParallelContext
    model: nn.Module
    parameters_by_stage: Mapping[int, Sequence[nn.Parameter]]
    tied: Sequence[tuple[nn.Parameter, tuple[int, ...]]]
    bucket_mb: float
    syncs_after: Callable[[int], bool] = lambda completed: False

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Tied parameters that another pipeline rank counts in the gradient norm."""
        here = self.context.index("pipeline")
        return [param for param, ranks in self.tied if ranks[0] != here]
