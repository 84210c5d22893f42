"""What inexact strategies have in common: every replica has parameters of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parts import ModelParts
from colossus.engine.replica_average import Distance, ReplicaAverage, Share
from colossus.engine.strategies.all_reduce import AllReduce
from colossus.engine.strategies.options.base import PerReplicaOptions


class PerReplica(AllReduce):
    """Base of the inexact strategies: gradients are summed inside of the replica, along data nothing is.

    A *meeting step* is one after which all replicas wait for each other anyway: because of an evaluation, a checkpoint,
    ``log_every``, or since it is the last. There the loss is of all replicas, else of this one (`StepResult.replica`).

    What is evaluated and exported is the average of the replicas (`Strategy.share`), unless ``evaluate`` is "own". It
    costs one all-reduce of the parameters over data, in chunks, for each evaluation, checkpoint and export, and the
    memory of the parameters once (of a checkpoint: of the part that a rank writes).
    """

    exact = False

    def __init__(self, options: PerReplicaOptions) -> None:
        self.options = options
        self.evaluates = options.evaluate

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self._average = ReplicaAverage(parts, self.trained)
        self._distance: Distance | None = None

    def meets_after(self, step: int) -> bool:
        """Whether step ``step`` (from 0) is a meeting step."""
        return self._is_logged(step) or self.parts.meets_after(step + 1)

    def _is_logged(self, step: int) -> bool:
        every = self.options.log_every
        return bool(every) and (step + 1) % every == 0

    def is_summed(self, step: int) -> bool:
        return self._data_group.size == 1 or self.meets_after(step)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        self._distance = None
        if not self.is_summed(step):
            return numbers
        self.meet()
        if self._is_logged(step) and self._data_group.size > 1:
            self._distance = self._average.measure(self.share())
        return super().reduce_scalars(step, numbers)

    # -- evaluation and export ------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        if self._data_group.size == 1 or self.is_averaged:
            yield
            return
        self.meet()
        if self.evaluates == "own":
            yield
            return
        with self._instead(self.share()):
            yield

    @contextmanager
    def export(self) -> Iterator[None]:
        if self._data_group.size == 1 or self.is_averaged:
            yield
            return
        self.meet()
        with self._instead(self.share() if self.evaluates == "average" else None):
            yield

    @contextmanager
    def _instead(self, share: Share | None) -> Iterator[None]:
        """Inside, the parameters are the average of the replicas, or the first replica's."""
        self.store.release()  # what compute has gathered is of the replica's own
        with self._average.in_place(share, self._keep_distance):
            self.is_averaged = True
            try:
                yield
            finally:
                self.is_averaged = False
                self.store.release()

    def _keep_distance(self, distance: Distance) -> None:
        self._distance = distance

    def consensus(self) -> dict[str, float]:
        if self._distance is None:
            return {}
        return {
            "consensus_distance": self._distance.absolute,
            "consensus_distance_relative": self._distance.relative,
        }
