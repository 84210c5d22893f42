"""The base of inexact strategies, under which every replica has parameters of its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from colossus.comm import collectives
from colossus.data_parallel.all_reduce import AllReduce
from colossus.data_parallel.options.strategy_options import PerReplicaOptions
from colossus.data_parallel.replica_average import Distance, ReplicaAverage
from colossus.data_parallel.stop_agreement import StopAgreement
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts

#: the index of the requests to stop among a step's numbers
_STOP = 3

log = logging.getLogger("colossus.engine")


class PerReplica(AllReduce):
    """The base of the inexact strategies: gradients are summed inside a replica, and not along data.

    A *sync point* is the end of a step after which all replicas wait for each other anyway: for an evaluation, a
    checkpoint, ``log_every``, or the end of training. There the loss is that of all replicas, else that of this one
    (`StepResult.replica`), and the requests to stop are summed with it. Between sync points `StopAgreement` spreads
    requests to stop.

    The average of the replicas is evaluated and exported (`average_addend`). Each evaluation, checkpoint and export
    costs one all-reduce of the parameters over data, in chunks, and the memory of the parameters once (for a
    checkpoint, the memory of the part that a rank writes).

    Attributes:
        holds_parameters: whether a replica that trains alone has the parameters themselves, not copies of them.
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
        if self.stop_agreement is not None and (requests := self.stop_agreement.pending_requests()):
            numbers[_STOP] += requests
        return super().replica_scalars(numbers)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        self._distance = None
        if not self.is_summed(step) or self.stop_agreement is None:
            return numbers
        self.stop_agreement.enter(step + 1)
        self.before_sync_point()
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
        self.before_sync_point()
        collectives.barrier(self._data_group, self.parts.context.device)
        self.stop_agreement.leave()

    def before_sync_point(self) -> None:
        """Prepare for a sync point, before replicas wait for each other in a collective over data.

        A strategy may wait longer here than a collective would, answer other replicas, and take in their messages.
        """
        self._is_apart = False

    def wait_before_close(self) -> None:
        """Wait for the other replicas before links close that they may need.

        It returns at once if no step was made since the last sync point, and after an exception, which the others
        notice by the links that close.
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
        self.store.release()  # gathered parameters are the replica's own
        with self._average.in_place(self.average_addend()) as self._distance:
            self.is_averaged = True
            try:
                yield
            finally:
                self.is_averaged = False
                self.store.release()

    def consensus(self) -> dict[str, float]:
        if self._distance is None:
            return {}
        absolute, relative = self._distance.absolute, self._distance.relative
        return {"consensus_distance": absolute, "consensus_distance_relative": relative}
