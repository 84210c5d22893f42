"""What inexact strategies have in common: every replica has parameters of its own."""

from __future__ import annotations

from torch import Tensor

from colossus.engine.strategies.all_reduce import AllReduce
from colossus.engine.strategies.options.base import PerReplicaOptions


class PerReplica(AllReduce):
    """Base of the inexact strategies: gradients are summed inside of the replica, along data nothing is.

    A *meeting step* is one after which all replicas wait for each other anyway: because of an evaluation, a checkpoint,
    ``log_every``, or since it is the last. There the loss is of all replicas, else of this one (`StepResult.replica`).
    """

    exact = False

    def __init__(self, options: PerReplicaOptions) -> None:
        self.options = options
        self.evaluates = options.evaluate

    def meets_after(self, step: int) -> bool:
        """Whether step ``step`` (from 0) is a meeting step."""
        every, completed = self.options.log_every, step + 1
        return bool(every and completed % every == 0) or self.parts.meets_after(completed)

    def is_summed(self, step: int) -> bool:
        return self._data_group.size == 1 or self.meets_after(step)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        if not self.is_summed(step):
            return numbers
        self.meet()
        return super().reduce_scalars(step, numbers)
