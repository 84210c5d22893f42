"""The times at which weights are gathered and their gradients reduced, and the lifetime of a gathered weight.

| scope | the weight is gathered | its gradient is reduced | the gathered weight is kept |
|---|---|---|---|
| ``matmul`` | for each matmul, in forward and again in backward | after each | never |
| ``microbatch`` | in forward | after each backward | from forward to backward |
| ``step`` | once for all microbatches of a step | once, after the last | for the step, with its gradient |
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from colossus.comm.autograd import is_recorded
from colossus.comm.kept_results import keeps_results, kept
from colossus.comm.pending import Pending, Ready
from colossus.comm.step_regions import GATHERS, timed
from colossus.context.precision import Precision
from colossus.layout.parameter_hooks import user_hooks
from colossus.tensor_parallel.dtypes import gradient_dtype
from colossus.tensor_parallel.move_plan import MovePlan, reduce_wgrad, run


class WgradDeferral:
    """A mode of backward: inside `deferred` it runs only dgrad, and leaves wgrad in a list, for `run`."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], None]] | None = None
        #: during `run`, the weights whose hooks run at its end
        self._accumulated: dict[int, Tensor] | None = None

    @property
    def is_active(self) -> bool:
        return self._tasks is not None

    def takes(self, weight: Tensor) -> bool:
        """Return whether wgrad of this weight is deferred; hooks on a weight need the usual backward."""
        return self.is_active and not user_hooks(weight)

    @contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Defer wgrads of a backward inside the context: the list gets one entry for each use of a weight.

        An entry computes the gradient of that use, reduces it and adds it to ``weight.grad``.
        """
        outer, self._tasks = self._tasks, []
        try:
            yield self._tasks
        finally:
            self._tasks = outer

    def defer(self, task: Callable[[], None]) -> None:
        """Add ``task``, the wgrad of one use of a weight, to the list for `run`."""
        assert self._tasks is not None
        self._tasks.append(task)

    def run(self, tasks: list[Callable[[], None]]) -> None:
        """Run the deferred tasks. Post-accumulate hooks run once for each weight, at the end."""
        self._accumulated = {}
        try:
            for task in tasks:
                task()
        finally:
            accumulated, self._accumulated = self._accumulated, None
        for weight in accumulated.values():
            run_grad_hooks(weight)

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Add a gradient to ``weight.grad`` as autograd would, with the hooks of the weight before and after."""
        for hook in list((weight._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        if self._accumulated is None:
            run_grad_hooks(weight)
        else:
            self._accumulated[id(weight)] = weight


def run_grad_hooks(weight: Tensor) -> None:
    """Call the post-accumulate hooks of a weight."""
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


SCOPES = ("matmul", "microbatch", "step")


class Addends(Protocol):
    """The sums of the gradients of parameters, for those that do not leave them to autograd."""

    def takes(self, param: Tensor) -> bool: ...

    def add(self, param: Tensor, gradient: Tensor) -> None: ...


@dataclass
class _GatheredWeight:
    """A weight that stays gathered during a step, and the sum of its gradients so far, not reduced yet.

    Attributes:
        state: state of the weight when it was gathered; if it changes, the weight is gathered again.
    """

    weight: Tensor
    plan: MovePlan
    state: tuple[int, int, torch.dtype]
    gathered: Tensor
    gradient: Tensor | None = None


class GatheredWeights:
    """The weights of one model on this rank, as tensor parallelism moves them.

    The engine calls `begin_step` and `end_step`; outside a step the scope ``step`` works as ``microbatch`` does.

    Attributes:
        scope: one of `SCOPES`.
        deferral: defers wgrad to a later action of the schedule.
        addends: takes gradients of products in place of autograd, where each is to be an addend of its own.
    """

    def __init__(self, scope: str = "matmul", *, precision: Precision | None = None) -> None:
        if scope not in SCOPES:
            raise ValueError(f"weights = {scope!r}: use one of {', '.join(SCOPES)}")
        self.scope = scope
        self.deferral = WgradDeferral()
        self.addends: Addends | None = None
        self._precision = precision or Precision()
        #: id -> weight, for the weights that stay gathered for the step
        self._gathered: dict[int, _GatheredWeight] = {}
        self._in_step = self._is_last = False

    @property
    def keeps(self) -> bool:
        """True if backward uses the weight that forward gathered."""
        return self.scope != "matmul"

    @timed(lambda _, weight, plan, dtype: ("gather of a weight", GATHERS) if plan.forward else None, starts=True)
    def gather(self, weight: Tensor, plan: MovePlan, dtype: torch.dtype) -> Pending:
        """Start to get the weight for a product: its shard, cast and moved by ``plan.forward``, or the gathered one."""
        changes = bool(plan.forward) or dtype != weight.dtype
        if not changes:
            return Ready(weight)
        if not (self._in_step and self.scope == "step") or is_recorded():
            if keeps_results():
                return Ready(kept("a gathered weight", lambda: self._start(weight, plan, dtype).wait()))
            return self._start(weight, plan, dtype)
        entry, state = self._gathered.get(id(weight)), (weight._version, weight.data_ptr(), dtype)
        if entry is None or entry.state != state:
            gathered = self._start(weight.detach(), plan, dtype).wait()
            gradient = None if entry is None else entry.gradient
            entry = self._gathered[id(weight)] = _GatheredWeight(weight, plan, state, gathered, gradient)
        return Ready(entry.gathered)

    def _start(self, weight: Tensor, plan: MovePlan, dtype: torch.dtype) -> Pending:
        return run(plan.forward, weight.to(dtype), owned=dtype != weight.dtype)

    def reduce(self, weight: Tensor, gradient: Tensor, plan: MovePlan) -> Pending | None:
        """Return the rank's shard of a weight's gradient, from the wgrad of one product; None if it comes later.

        The sum over ranks is taken in the precision's dtype of reduction.
        """
        if self.addends is not None and self.addends.takes(weight):
            self.addends.add(weight, reduce_wgrad(weight, gradient, plan, self._precision).wait())
            return None
        # hooks on the weight run at each backward; a recorded graph must not depend on the id of one weight
        if is_recorded() or id(weight) not in self._gathered or user_hooks(weight):
            return reduce_wgrad(weight, gradient, plan, self._precision)
        entry = self._gathered[id(weight)]
        if entry.gradient is None:
            entry.gradient = gradient.to(gradient_dtype(weight))
        else:  # in one pass on accelerators, which widen each number as they add it
            entry.gradient.add_(gradient)
        if not self._is_last:
            return None
        total, entry.gradient = entry.gradient, None
        return reduce_wgrad(weight, total, entry.plan, self._precision)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step: until `end_step` a weight is gathered again only when it changes."""
        self.abandon_step()
        self._in_step = True

    def set_last_microbatch(self, is_last: bool = True) -> None:
        """Set whether later backwards are those of a step's last microbatch, after which gradients are reduced."""
        self._is_last = is_last

    def flush(self, only: Container[int] | None = None) -> None:
        """Reduce the gradients that no backward has reduced, and free the weights.

        The last microbatch may not have used all weights.

        Args:
            only: ids of the weights to flush; None: all.
        """
        for key in [key for key in self._gathered if only is None or key in only]:
            entry = self._gathered.pop(key)
            if entry.gradient is not None:
                total = reduce_wgrad(entry.weight, entry.gradient, entry.plan, self._precision).wait()
                self.deferral.accumulate(entry.weight, total)

    def end_step(self) -> None:
        """Run `flush` for all weights, and close the step."""
        try:
            self.flush()
        finally:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Close the step, without reducing the remaining gradients."""
        self._gathered.clear()
        self._in_step = self._is_last = False
