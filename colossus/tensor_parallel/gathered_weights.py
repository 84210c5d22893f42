"""When weights are gathered and their gradients reduced, and how long a gathered weight is kept.

| scope | the weight is gathered | its gradient is reduced | the gathered weight is kept |
|---|---|---|---|
| ``matmul`` | for each matmul, in forward and again in backward | after each | never |
| ``microbatch`` | in forward | after each backward | from forward to backward |
| ``step`` | once for all microbatches of a step | once, after the last | for the step, with its gradient |
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from colossus.comm.collectives import Pending, Ready
from colossus.comm.recorded import is_recorded
from colossus.context.precision import Precision
from colossus.tensor_parallel.coalescing import Coalescing
from colossus.tensor_parallel.move_plan import MovePlan, reduce_wgrad, run
from colossus.tensor_parallel.step_cache import StepCache
from colossus.tensor_parallel.weight_group import WeightGroup
from colossus.tensor_parallel.wgrad_deferral import WgradDeferral

SCOPES = ("matmul", "microbatch", "step")


class GatheredWeights:
    """The weights of one model on this rank, as tensor parallelism moves them.

    The engine calls `begin_step` and `end_step`; outside of a step the scope ``step`` works as ``microbatch`` does, and
    nothing is coalesced.

    Attributes:
        scope: one of `SCOPES`.
        coalescing: which weights move in one collective.
        deferral: of wgrad, to a later action of the schedule.
    """

    def __init__(self, scope: str = "matmul", *, coalesce: bool = False, precision: Precision | None = None) -> None:
        if scope not in SCOPES:
            raise ValueError(f"weights = {scope!r}: use one of {', '.join(SCOPES)}")
        self.scope = scope
        self.deferral = WgradDeferral()
        self._precision = precision or Precision()
        self.coalescing = Coalescing(coalesce and scope != "step", self.deferral.accumulate, self._precision)
        self._cache = StepCache(self.deferral.accumulate, self._precision)
        self._in_step = False

    @property
    def keeps(self) -> bool:
        """Whether backward uses the weight that forward gathered."""
        return self.scope != "matmul"

    def gather(self, weight: Tensor, plan: MovePlan, dtype: torch.dtype) -> Pending:
        """The weight as it is multiplied: its shard, cast and moved by ``plan.forward``, or what was kept of that."""
        group = self._group_of(weight)
        if group is not None:
            return Ready(group.gather(weight, dtype))
        changes = bool(plan.forward) or dtype != weight.dtype
        # under selective checkpointing the recorder keeps the gathered weight, and gives it back
        if not (self._in_step and self.scope == "step" and changes) or is_recorded():
            return run(plan.forward, weight.to(dtype), owned=dtype != weight.dtype)
        return Ready(self._cache.gather(weight, plan, dtype))

    def reduce(self, weight: Tensor, gradient: Tensor, plan: MovePlan) -> Pending | None:
        """The rank's shard of a weight's gradient, from the wgrad of one multiplication; None when it comes later.

        The sum over ranks is taken in the precision's dtype of reduction.
        """
        group = self._group_of(weight)
        if group is not None:
            return group.reduce(weight, gradient, self.deferral.accumulate)
        # hooks on the weight are called at each backward; a compiler is not to ask for one weight, of one layer
        if is_recorded() or not self._cache.holds(weight) or weight._backward_hooks:
            return reduce_wgrad(weight, gradient, plan, self._precision)
        return self._cache.reduce(weight, gradient)

    def _group_of(self, weight: Tensor) -> WeightGroup | None:
        return None if is_recorded() or not self._in_step else self.coalescing.group_of(weight)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """From here to `end_step` a weight is gathered again only when it changes."""
        self._cache.clear()
        self._in_step = True

    def set_last_microbatch(self, is_last: bool = True) -> None:
        """Whether backwards from here on are those of a step's last microbatch, after which gradients are reduced."""
        self._cache.is_last = is_last

    def flush(self, only: Container[int] | None = None) -> None:
        """Reduce gradients that no backward has (of weights that the last microbatch did not use); free the weights.

        Args:
            only: ids of the weights to flush, of coalesced ones all or none; None: all.
        """
        self._cache.flush(only)
        self.coalescing.flush(only)

    def end_step(self) -> None:
        """`flush` all weights, and close the step."""
        try:
            self.flush()
        finally:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Close the step, without reducing what is left."""
        self._cache.clear()
        self.coalescing.clear()
        self._in_step = False
