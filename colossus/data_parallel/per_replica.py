"""What inexact strategies have in common: every replica has parameters of its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from colossus.comm import collectives
from colossus.data_parallel.all_reduce import AllReduce
from colossus.data_parallel.options.strategy_options import PerReplicaOptions
from colossus.data_parallel.replica_average import Distance, ReplicaAverage
from colossus.data_parallel.stop_agreement import StopAgreement
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts

#: where the requests to stop are in a step's numbers
_STOP = 3

log = logging.getLogger("colossus.engine")


class PerReplica(AllReduce):
    """Base of the inexact strategies: gradients are summed inside of the replica, along data nothing is.

    A *sync point* is one after which all replicas wait for each other anyway: because of an evaluation, a checkpoint,
    ``log_every``, or since it is the last. There the loss is of all replicas, else of this one (`StepResult.replica`),
    and all hear of requests to stop with it; between two of these they hear of it as `StopAgreement` says.

    What is evaluated and exported is the average of the replicas (`average_addend`). It costs one all-reduce of the
    parameters over data, in chunks, for each evaluation, checkpoint and export, and the memory of the parameters once
    (of a checkpoint: of the part that a rank writes).

    Attributes:
        holds_parameters: whether a replica that trains alone has the parameters itself; else it has copies of them.
    """

    exact = False
    holds_parameters: bool = True

    def __init__(self, options: PerReplicaOptions) -> None:
        self.options = options

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self._average = ReplicaAverage(parts, self.trained)
        self._distance: Distance | None = None
        self._completed = 0
        #: whether steps were made since the last sync point
        self._is_apart = False
        self._requests_of_all = 0.0
        self.stop_agreement: StopAgreement | None = None
        if self._data_group.size > 1:
            self.stop_agreement = StopAgreement(parts.context, on_progress=lambda: self.on_progress())
        elif parts.context.rank == 0:
            name = type(self).__name__
            log.warning("%s: parallel.data is 1, so one replica trains alone: nothing is mixed or averaged", name)

    def _is_logged(self, step: int) -> bool:
        every = self.options.log_every
        return bool(every) and (step + 1) % every == 0

    def is_summed(self, step: int) -> bool:
        return self._data_group.size == 1 or self._is_logged(step) or self.parts.syncs_after(step + 1)

    def begin_step(self, step: int) -> None:
        self._completed, self._is_apart = step, True

    def abandon(self) -> None:
        self._is_apart = False

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        if self.stop_agreement is not None and (heard := self.stop_agreement.heard()):
            numbers[_STOP] += heard
        return super().replica_scalars(numbers)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        self._distance = None
        if not self.is_summed(step) or self.stop_agreement is None:
            return numbers
        self.stop_agreement.enter(step + 1)
        self.come_together()
        if self._is_logged(step):
            self._distance = self._average.distance(self._average.parameters(self.average_addend()))
        total = self.sum_over_replicas(numbers)
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

    def sync_point(self) -> None:
        if self.stop_agreement is None:
            return
        self.stop_agreement.enter(self._completed + 1)
        self.come_together()
        collectives.barrier(self._data_group, self.parts.context.device)
        self.stop_agreement.leave()

    def come_together(self) -> None:
        """What a strategy does where all replicas meet, before they do in a collective over data: wait longer than that
        would, answer the others, take in what is under way.
        """
        self._is_apart = False

    def part(self) -> None:
        """Before links are closed that others may need: wait for them, unless nothing was done since the last sync
        point, or a step has failed or an exception is on its way, of which they hear by the closing.
        """
        if self._is_apart and sys.exception() is None:
            self.sync_point()

    # -- evaluation and export ------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        if self.is_averaged or (self.holds_parameters and self._data_group.size == 1):
            yield
            return
        self.sync_point()
        self.store.release()  # what compute has gathered is of the replica's own
        with self._average.in_place(self.average_addend()) as self._distance:
            self.is_averaged = True
            try:
                yield
            finally:
                self.is_averaged = False
                self.store.release()

    def export(self) -> AbstractContextManager[None]:
        return self.evaluation()

    def consensus(self) -> dict[str, float]:
        if self._distance is None:
            return {}
        absolute, relative = self._distance.absolute, self._distance.relative
        return {"consensus_distance": absolute, "consensus_distance_relative": relative}
