"""What inexact strategies have in common: every replica has parameters of its own."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parts import ModelParts
from colossus.engine.strategies.all_reduce import AllReduce
from colossus.engine.strategies.options.base import PerReplicaOptions
from colossus.engine.strategies.stop_agreement import StopAgreement

#: where the requests to stop are in a step's numbers
_STOP = 3


class PerReplica(AllReduce):
    """Base of the inexact strategies: gradients are summed inside of the replica, along data nothing is.

    A *meeting step* is one after which all replicas wait for each other anyway: because of an evaluation, a checkpoint,
    ``log_every``, or since it is the last. There the loss is of all replicas, else of this one (`StepResult.replica`),
    and all hear of requests to stop with it; between two of these they hear of it as `StopAgreement` says.

    Attributes:
        stops_by_store: whether they do; of strategies with a way of their own it is false.
    """

    exact = False
    stops_by_store: ClassVar[bool] = True

    def __init__(self, options: PerReplicaOptions) -> None:
        self.options = options

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self._completed = 0
        self._requests_of_all = 0.0
        has_others = self._data_group.size > 1
        self.stop_agreement = StopAgreement(parts.context) if has_others and self.stops_by_store else None

    def meets_after(self, step: int) -> bool:
        """Whether step ``step`` (from 0) is a meeting step."""
        every, completed = self.options.log_every, step + 1
        return bool(every and completed % every == 0) or self.parts.meets_after(completed)

    def is_summed(self, step: int) -> bool:
        return self._data_group.size == 1 or self.meets_after(step)

    def begin_step(self, step: int) -> None:
        self._completed = step

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        if self.stop_agreement is not None and (heard := self.stop_agreement.heard()):
            numbers[_STOP] += heard
        return super().replica_scalars(numbers)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        if not self.is_summed(step) or self._data_group.size == 1:
            return numbers
        if self.stop_agreement is not None:
            self.stop_agreement.enter(step + 1)
        self.come_together()
        total = super().reduce_scalars(step, numbers)
        if self.stop_agreement is not None:
            self.stop_agreement.leave(looks=False)
            self._requests_of_all = float(total[_STOP])
        return total

    def agree_on_stop(self, step: int, requests: float) -> float:
        self._completed = step + 1
        if self.stop_agreement is None:
            return requests
        if self.is_summed(step):
            return self._requests_of_all
        return self.stop_agreement.agree(step + 1, requests)

    def meet(self) -> None:
        if self._data_group.size == 1:
            return
        if self.stop_agreement is None:
            self.come_together()
            return
        self.stop_agreement.enter(self._completed + 1)
        self.come_together()
        collectives.all_reduce(torch.zeros(1, device=self.parts.context.device), self._data_group, owned=True).wait()
        self.stop_agreement.leave()

    def come_together(self) -> None:
        """What a strategy does where all replicas meet, before they do in a collective over data: wait longer than that
        would, answer the others, take in what is under way."""

    def share(self) -> tuple[list[Tensor], float]:
        """This replica's addend of the average, for each of `Strategy.optimizer_parameters`' stored parameters in the
        order of ``store.trainable()``, and its weight. The average is the sum of these over the sum of the weights,
        over all replicas; what is on its way is counted by who is to get it."""
        return [param.detach() for param in self.store.trainable()], 1.0
