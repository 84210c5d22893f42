"""The exact data-parallel strategy: gradients are all-reduced in buckets, overlapped with backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.stage_buckets import StageBuckets


class AllReduce:
    """One all-reduce per bucket of gradients, started as soon as backward has filled it.

    Buckets start in the same order on all ranks, whatever order their gradients are made in (as in torch's DDP,
    2006.15704), and only once the last backward of the step for their parameters has begun.

    Args:
        bucket_mb: size of a bucket.
        parameters_by_stage: stage -> the parameters whose last backward is its, in the order in which the stages are
            reduced; None: one stage with all parameters of the model.
    """

    exact = True

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        bucket_mb: float,
        parameters_by_stage: Mapping[int, Sequence[nn.Parameter]] | None = None,
    ) -> None:
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        limit = int(bucket_mb * 2**20)
        if parameters_by_stage is None:
            parameters_by_stage = {0: list(model.parameters())}
        self._buckets = {
            stage: StageBuckets(params, context, limit, self._on_gradient)
            for stage, params in parameters_by_stage.items()
        }
        self._order = list(parameters_by_stage)
        #: the stage whose last backward has begun
        self._armed: int | None = None
        #: number of stages whose buckets have all been started in this step
        self._num_started = 0

    def arm(self, stage: int = 0) -> None:
        """The backward that follows is a stage's last of the step: reduce the buckets that it fills."""
        if any(param.requires_grad for param in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the engine was made is trainable now: its gradient would not be "
                "summed over the ranks, and the optimizer does not have it. Unfreeze it while the model is built, or "
                "make a new engine"
            )
        self._buckets[stage].prepare()
        self._armed = stage

    def start(self, stage: int = 0) -> None:
        """Start the reductions of a stage that have not been started, without waiting for any."""
        assert stage == self._order[self._num_started], "stages are reduced in their order"
        self._buckets[stage].start_rest()
        self._armed = None
        self._num_started += 1

    def finish(self) -> None:
        """Wait until every gradient is summed."""
        for buckets in self._buckets.values():
            buckets.finish()
        self._num_started = 0

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._armed, self._num_started = None, 0
        for buckets in self._buckets.values():
            buckets.reset()

    def _on_gradient(self, param: nn.Parameter) -> None:
        # while a stage before this one has buckets to start, these wait for their turn: `start` takes them then
        if self._armed is not None and self._armed == self._order[self._num_started]:
            self._buckets[self._armed].take(param)
