"""Weights that stay gathered for a step, with the sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from torch import Tensor

from colossus.comm.collectives import Pending
from colossus.tensor_parallel.route import Route, run


@dataclass
class _GatheredWeight:
    """A weight that is kept gathered during a step, and the sum of its gradients so far, not reduced yet.

    Attributes:
        state: of the weight when it was gathered; another one asks for another gather.
    """

    weight: Tensor
    route: Route
    state: tuple[int, int]
    gathered: Tensor
    gradient: Tensor | None = None


class StepCache:
    """Gathers each weight once in a step, or when it has changed, and reduces its gradient once, with the last use.

    Args:
        accumulate: adds a gradient to that of a weight.
    """

    def __init__(self, accumulate: Callable[[Tensor, Tensor], None]) -> None:
        self._accumulate = accumulate
        self._held: dict[int, _GatheredWeight] = {}
        #: whether backwards are those of a step's last microbatch
        self.is_last = False

    def gather(self, weight: Tensor, route: Route) -> Tensor:
        held, state = self._held.get(id(weight)), (weight._version, weight.data_ptr())
        if held is None or held.state != state:
            gathered = run(route.forward, weight.detach()).wait()
            gradient = None if held is None else held.gradient
            held = self._held[id(weight)] = _GatheredWeight(weight, route, state, gathered, gradient)
        return held.gathered

    def holds(self, weight: Tensor) -> bool:
        return id(weight) in self._held

    def reduce(self, weight: Tensor, gradient: Tensor) -> Pending | None:
        """The reduced sum of a held weight's gradients with the last microbatch, None before."""
        held = self._held[id(weight)]
        held.gradient = gradient if held.gradient is None else held.gradient.add_(gradient)
        if not self.is_last:
            return None
        total, held.gradient = held.gradient, None
        return run(held.route.backward, total, owned=True)

    def flush(self, only: Container[int] | None) -> None:
        """Reduce what no backward has; free the weights. Of those in ``only``, by id; None: all."""
        for key in [key for key in self._held if only is None or key in only]:
            held = self._held.pop(key)
            if held.gradient is not None:
                self._accumulate(held.weight, run(held.route.backward, held.gradient, owned=True).wait())

    def clear(self) -> None:
        """Free all, without reducing what is left."""
        self._held.clear()
        self.is_last = False
