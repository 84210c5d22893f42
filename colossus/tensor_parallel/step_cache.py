"""Weights that stay gathered for a step, with the sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.collectives import Pending
from colossus.context.precision import Precision
from colossus.tensor_parallel.dtypes import gradient_dtype
from colossus.tensor_parallel.move_plan import MovePlan, reduce_wgrad, run


@dataclass
class _GatheredWeight:
    """A weight that is kept gathered during a step, and the sum of its gradients so far, not reduced yet.

    Attributes:
        state: of the weight when it was gathered; another one asks for another gather.
    """

    weight: Tensor
    plan: MovePlan
    state: tuple[int, int, torch.dtype]
    gathered: Tensor
    gradient: Tensor | None = None


class StepCache:
    """Gathers each weight once in a step, or when it has changed, and reduces its gradient once, with the last use.

    Args:
        accumulate: adds a gradient to that of a weight.
    """

    def __init__(self, accumulate: Callable[[Tensor, Tensor], None], precision: Precision) -> None:
        self._accumulate, self._precision = accumulate, precision
        self._held: dict[int, _GatheredWeight] = {}
        #: whether backwards are those of a step's last microbatch
        self.is_last = False

    def gather(self, weight: Tensor, plan: MovePlan, dtype: torch.dtype) -> Tensor:
        held, state = self._held.get(id(weight)), (weight._version, weight.data_ptr(), dtype)
        if held is None or held.state != state:
            gathered = run(plan.forward, weight.detach().to(dtype), owned=dtype != weight.dtype).wait()
            gradient = None if held is None else held.gradient
            held = self._held[id(weight)] = _GatheredWeight(weight, plan, state, gathered, gradient)
        return held.gathered

    def holds(self, weight: Tensor) -> bool:
        return id(weight) in self._held

    def reduce(self, weight: Tensor, gradient: Tensor) -> Pending | None:
        """The reduced sum of a held weight's gradients with the last microbatch, None before."""
        held = self._held[id(weight)]
        gradient = gradient.to(gradient_dtype(weight))
        held.gradient = gradient if held.gradient is None else held.gradient.add_(gradient)
        if not self.is_last:
            return None
        total, held.gradient = held.gradient, None
        return reduce_wgrad(weight, total, held.plan, self._precision)

    def flush(self, only: Container[int] | None) -> None:
        """Reduce what no backward has; free the weights. Of those in ``only``, by id; None: all."""
        for key in [key for key in self._held if only is None or key in only]:
            held = self._held.pop(key)
            if held.gradient is not None:
                total = reduce_wgrad(held.weight, held.gradient, held.plan, self._precision).wait()
                self._accumulate(held.weight, total)

    def clear(self) -> None:
        """Free all, without reducing what is left."""
        self._held.clear()
        self.is_last = False
