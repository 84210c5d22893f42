"""The base of strategies, seen from a step's numbers: what all ranks, or those of a replica, agree on."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.reduction import ModelParts


class StepNumbers:
    """The sums of a step's numbers over ranks, by which gradients are divided and clipped, and the common stop.

    Attributes:
        exact: whether replicas stay equal, and a step's numbers are those of the global batch.
        parts: the model of this rank.
    """

    exact: ClassVar[bool] = True
    parts: ModelParts
    #: the ranks over `summed_axes`, and along data
    _step_group: AxisGroup
    _data_group: AxisGroup

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes over which gradients and the step's numbers are summed: all, or those inside a replica."""
        context = self.parts.context
        return context.grid.names if self.exact else context.replica_axes

    def squares_of_step(self, norm: GradientNorm, squares: Tensor) -> Tensor:
        """Return this rank's addends of the squared gradient norm, for each parameter of ``norm``: float64 [params].

        Args:
            norm: the gradient norm.
            squares: the squares of the gradients on this rank, not finite where a gradient is not.
        """
        return squares

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        """Sum the step's numbers, float64 [n], over the replica's ranks, or over all under an exact strategy.

        Gradients are divided and clipped by the sums, so this waits for them.
        """
        return collectives.all_reduce(numbers, self._step_group, owned=True).wait()

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        """Return the logged numbers of step ``step``, float64 [loss sum, count, gradient norm, ..].

        They are those of all replicas where `is_summed` is true, else those of this replica.
        """
        return numbers if self.exact else self.sum_over_replicas(numbers)

    def sum_over_replicas(self, numbers: Tensor) -> Tensor:
        """Sum the replicas' numbers of a step; of the gradient norm, return the mean. Collective over data."""
        if self._data_group.size == 1:
            return numbers
        total = collectives.all_reduce(numbers.clone(), self._data_group, owned=True).wait()
        total[2] /= self._data_group.size
        return total

    def is_summed(self, step: int) -> bool:
        """Return whether the logged numbers of step ``step`` are those of all replicas."""
        return True

    def agree_on_stop(self, step: int, requests: float) -> float:
        """Return the requests to stop that all replicas act on after step ``step``; called at the end of each step.

        Args:
            step: the step, the same on all replicas where the result is not 0.
            requests: the requests of the ranks that `replica_scalars` sums over, in every step from the first on.
        """
        return requests

    def sync_point(self) -> None:
        """Wait until all replicas have come here, before they evaluate, save or end together."""

    def consensus(self) -> dict[str, float]:
        """Return the distance of the replicas from their average, where the last step or an evaluation measured it.

        The keys are ``consensus_distance`` and ``consensus_distance_relative`` (`replica_average.Distance`).
        """
        return {}
