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
from colossus.tensor_parallel.route import Route, run
from colossus.tensor_parallel.weight_group import Member, WeightGroup

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
        self._deferred_wgrad: list[Callable[[], None]] | None = None
        #: weights whose deferred gradients are being made
        self._made: dict[int, Tensor] | None = None
        self._groups: dict[int, WeightGroup] = {}
        self._coalesced: set[int] = set()

    @property
    def keeps(self) -> bool:
        """Whether backward uses the weight that forward gathered."""
        return self.scope != "matmul"

    def fetch(self, weight: Tensor, route: Route) -> Pending:
        """The weight as used in a multiplication."""
        group = self._group_of(weight)
        if group is not None:
            return Ready(group.fetch(weight))
        # a recorded gather is kept, and played back, by what records it
        if not (self._in_step and self.scope == "step" and route.forward) or is_recorded():
            return run(route.forward, weight)
        held = self._held.get(id(weight))
        if held is None:
            held = self._held[id(weight)] = _Held(weight, route, run(route.forward, weight.detach()).wait())
        return Ready(held.used)

    def reduce(self, weight: Tensor, gradient: Tensor, route: Route) -> Pending | None:
        """The stored part of a weight's gradient from what one multiplication made; None when it comes later."""
        group = self._group_of(weight)
        if group is not None:
            return group.reduce(weight, gradient, self.accumulate_grad)
        held = self._held.get(id(weight))
        if held is None or is_recorded():
            return run(route.backward, gradient, owned=True)
        held.gradient = gradient if held.gradient is None else held.gradient.add_(gradient)
        if not self._is_last:
            return None
        total, held.gradient = held.gradient, None
        return run(route.backward, total, owned=True)

    def _group_of(self, weight: Tensor) -> WeightGroup | None:
        """What a weight moves with just now."""
        return self._groups.get(id(weight)) if self._in_step and not is_recorded() else None

    def is_coalesced(self, weight: Tensor) -> bool:
        """Whether `coalesce` was called for it."""
        return id(weight) in self._coalesced

    def coalesce(self, *members: Member) -> None:
        """From here on, within steps, these weights are fetched together and their gradients reduced together."""
        self._coalesced.update(id(member.weight) for member in members)
        if self.coalesces and all(member.can_join for member in members):
            groups = {member.route.forward[0].group for member in members}
            dtypes = {member.weight.dtype for member in members}
            if len(groups) == len(dtypes) == 1:
                group = WeightGroup(members)
                self._groups.update({id(member.weight): group for member in members})

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Weights do not change from here to `end_step`."""
        self._held.clear()
        self._in_step, self._is_last = True, False

    def arm(self, last: bool = True) -> None:
        """Whether backwards from here on are the last to use their weights in this step."""
        self._is_last = last

    def flush(self, only: Container[int] | None = None) -> None:
        """Reduce what no backward has reduced (a weight that the last microbatch did not use), and let go of it.

        Args:
            only: ids of the weights that are meant, of those that move together all or none; None: all.
        """
        for key in [key for key in self._held if only is None or key in only]:
            held = self._held.pop(key)
            if held.gradient is not None:
                self.accumulate_grad(held.weight, run(held.route.backward, held.gradient, owned=True).wait())
        for group in dict.fromkeys(self._groups.values()):
            for member in group.members:
                if only is None or id(member.weight) in only:
                    gradient = group.gradients.pop(id(member.weight), None)
                    if gradient is not None:
                        self.accumulate_grad(member.weight, run(member.route.backward, gradient, owned=True).wait())

    def end_step(self) -> None:
        """`flush` everything, and let go."""
        try:
            self.flush()
        finally:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Let go of everything without reducing it."""
        self._held.clear()
        for group in self._groups.values():
            group.used.clear()
            group.gradients.clear()
        self._in_step = self._is_last = False

    # -- deferred weight gradients ------------------------------------------------------------------------

    @property
    def defers_wgrad(self) -> bool:
        """Whether backward runs inside of `deferred_wgrad`."""
        return self._deferred_wgrad is not None

    def can_defer_wgrad(self, weight: Tensor) -> bool:
        """Whether the gradient of a weight is to be deferred. One with tensor hooks is not: autograd runs them."""
        return self.defers_wgrad and not weight._backward_hooks

    def defer_wgrad(self, task: Callable[[], None]) -> None:
        """Leave the gradient of one use of a weight to `run_wgrad`."""
        assert self._deferred_wgrad is not None
        self._deferred_wgrad.append(task)

    def accumulate_grad(self, weight: Tensor, gradient: Tensor) -> None:
        """Add a gradient that did not come through autograd, past hooks on the weight, and tell who waits for it."""
        _accumulate(weight, gradient)
        if self._made is None:
            _run_grad_hooks(weight)
        else:
            self._made[id(weight)] = weight

    def run_wgrad(self, tasks: list[Callable[[], None]]) -> None:
        """Make the gradients that `deferred_wgrad` left. Hooks run once for each weight, with all its uses summed."""
        self._made = {}
        try:
            for task in tasks:
                task()
        finally:
            made, self._made = self._made, None
        for weight in made.values():
            _run_grad_hooks(weight)

    @contextmanager
    def deferred_wgrad(self) -> Iterator[list[Callable[[], None]]]:
        """Backward inside makes the gradients of inputs only (dgrad); the list given is for `run_wgrad`.

        Each entry makes the gradient of one use of a weight, reduces it and adds it to ``weight.grad``: the separate
        backward of weights that zero-bubble schedules need (2401.10241).
        """
        outer, self._deferred_wgrad = self._deferred_wgrad, []
        try:
            yield self._deferred_wgrad
        finally:
            self._deferred_wgrad = outer


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add a gradient that did not come through autograd, as autograd would."""
    for hook in list((weight._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _run_grad_hooks(weight: Tensor) -> None:
    """Call those who wait for a gradient."""
    for told in list((weight._post_accumulate_grad_hooks or {}).values()):
        told(weight)
