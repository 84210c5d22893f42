"""Fetching of weights, apart from the matmul: how long one is held as used, and when its gradient is reduced.

| scope | the weight is gathered | its gradient is reduced | held as used |
|---|---|---|---|
| ``matmul`` | for each matmul, in forward and again in backward | after each | never |
| ``microbatch`` | in forward | after each backward | from forward to backward |
| ``step`` | once for all microbatches of a step | once, after the last | for the step, with its gradient |
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from colossus.comm.collectives import Pending, Ready, is_recorded
from colossus.layers.coalesced import Member, Together
from colossus.layers.route import Route, run

SCOPES = ("matmul", "microbatch", "step")


@dataclass
class _Held:
    """A weight as used during a step, and the sum of its gradients so far, as made."""

    weight: Tensor
    route: Route
    used: Tensor
    gradient: Tensor | None = None


class WeightStore:
    """The weights of one model on this rank. The engine opens and closes steps; outside, ``step`` is ``microbatch``.

    Attributes:
        scope: one of `SCOPES`.
    """

    def __init__(self, scope: str = "matmul", *, coalesce: bool = False) -> None:
        if scope not in SCOPES:
            raise ValueError(f"weights = {scope!r}: use one of {', '.join(SCOPES)}")
        self.scope = scope
        #: whether weights that are used one after the other move in one collective
        self.coalesces = coalesce and scope != "step"
        self._held: dict[int, _Held] = {}
        self._in_step = self._is_last = False
        self._later: list[Callable[[], None]] | None = None
        #: weights whose late gradients are being made
        self._made: dict[int, Tensor] | None = None
        self._together: dict[int, Together] = {}
        self._asked: set[int] = set()

    @property
    def keeps(self) -> bool:
        """Whether backward uses the weight that forward gathered."""
        return self.scope != "matmul"

    def fetch(self, weight: Tensor, route: Route) -> Pending:
        """The weight as used in a multiplication."""
        together = self._together_with(weight)
        if together is not None:
            return Ready(together.fetch(weight))
        # a recorded gather is kept, and played back, by what records it
        if not (self._in_step and self.scope == "step" and route.there) or is_recorded():
            return run(route.there, weight)
        held = self._held.get(id(weight))
        if held is None:
            held = self._held[id(weight)] = _Held(weight, route, run(route.there, weight.detach()).wait())
        return Ready(held.used)

    def reduce(self, weight: Tensor, gradient: Tensor, route: Route) -> Pending | None:
        """The stored part of a weight's gradient from what one multiplication made; None when it comes later."""
        together = self._together_with(weight)
        if together is not None:
            return together.reduce(weight, gradient, self.deliver)
        held = self._held.get(id(weight))
        if held is None or is_recorded():
            return run(route.back, gradient, owned=True)
        held.gradient = gradient if held.gradient is None else held.gradient.add_(gradient)
        if not self._is_last:
            return None
        total, held.gradient = held.gradient, None
        return run(route.back, total, owned=True)

    def _together_with(self, weight: Tensor) -> Together | None:
        """What a weight moves with just now."""
        return self._together.get(id(weight)) if self._in_step and not is_recorded() else None

    def is_together(self, weight: Tensor) -> bool:
        """Whether `put_together` was called for it."""
        return id(weight) in self._asked

    def put_together(self, *members: Member) -> None:
        """From here on, within steps, these weights are fetched together and their gradients reduced together."""
        self._asked.update(id(member.weight) for member in members)
        if self.coalesces and all(member.can_join for member in members):
            groups = {member.route.there[0].group for member in members}
            dtypes = {member.weight.dtype for member in members}
            if len(groups) == len(dtypes) == 1:
                together = Together(members)
                self._together.update({id(member.weight): together for member in members})

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Weights do not change from here to `end_step`."""
        self._held.clear()
        self._in_step, self._is_last = True, False

    def arm(self, last: bool = True) -> None:
        """Whether backwards from here on are the last to use their weights in this step."""
        self._is_last = last

    def settle(self, only: Container[int] | None = None) -> None:
        """Reduce what no backward has reduced (a weight that the last microbatch did not use), and let go of it.

        Args:
            only: ids of the weights that are meant, of those that move together all or none; None: all.
        """
        for key in [key for key in self._held if only is None or key in only]:
            held = self._held.pop(key)
            if held.gradient is not None:
                self.deliver(held.weight, run(held.route.back, held.gradient, owned=True).wait())
        for together in dict.fromkeys(self._together.values()):
            for member in together.members:
                if only is None or id(member.weight) in only:
                    gradient = together.gradients.pop(id(member.weight), None)
                    if gradient is not None:
                        self.deliver(member.weight, run(member.route.back, gradient, owned=True).wait())

    def end_step(self) -> None:
        """`settle` everything, and let go."""
        try:
            self.settle()
        finally:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Let go of everything without reducing it."""
        self._held.clear()
        for together in self._together.values():
            together.used.clear()
            together.gradients.clear()
        self._in_step = self._is_last = False

    # -- deferred weight gradients ------------------------------------------------------------------------

    @property
    def is_deferring(self) -> bool:
        return self._later is not None

    def can_defer(self, weight: Tensor) -> bool:
        """Whether the gradient of a weight is to be made later. Hooks on it must see it once, where they expect it."""
        return self.is_deferring and not weight._backward_hooks

    def defer(self, work: Callable[[], None]) -> None:
        """Keep the making of a weight gradient for later."""
        assert self._later is not None
        self._later.append(work)

    def deliver(self, weight: Tensor, gradient: Tensor) -> None:
        """Add a gradient that did not come through autograd, past hooks on the weight, and tell who waits for it."""
        _accumulate(weight, gradient)
        if self._made is None:
            _tell(weight)
        else:
            self._made[id(weight)] = weight

    def make_late(self, work: list[Callable[[], None]]) -> None:
        """Do what `deferring` left. Who waits for a gradient is told once, when all uses of the weight are in it."""
        self._made = {}
        try:
            for piece in work:
                piece()
        finally:
            made, self._made = self._made, None
        for weight in made.values():
            _tell(weight)

    @contextmanager
    def deferring(self) -> Iterator[list[Callable[[], None]]]:
        """Backward inside the block makes the gradients of inputs only; the list it gives makes those of weights.

        Each entry computes the gradient of one use of a weight, reduces it and puts it into ``weight.grad`` (see
        `make_late`): the separate backward of weights that zero-bubble schedules need (2401.10241).
        """
        outer, self._later = self._later, []
        try:
            yield self._later
        finally:
            self._later = outer


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add a gradient that did not come through autograd, as autograd would."""
    for hook in list((weight._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _tell(weight: Tensor) -> None:
    """Call those who wait for a gradient."""
    for told in list((weight._post_accumulate_grad_hooks or {}).values()):
        told(weight)
