"""When weights are gathered and their gradients reduced, and how long a gathered weight is kept.

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

from torch import Tensor

from colossus.comm.collectives import Pending, Ready, is_recorded
from colossus.tensor_parallel.route import Route, run
from colossus.tensor_parallel.weight_group import GroupedWeight, WeightGroup

SCOPES = ("matmul", "microbatch", "step")


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


class WeightStore:
    """The weights of one model on this rank.

    The engine calls `begin_step` and `end_step`; outside of a step the scope ``step`` works as ``microbatch`` does.

    Attributes:
        scope: one of `SCOPES`.
        coalesces: whether weights that are needed one after the other move in one collective.
    """

    def __init__(self, scope: str = "matmul", *, coalesce: bool = False) -> None:
        if scope not in SCOPES:
            raise ValueError(f"weights = {scope!r}: use one of {', '.join(SCOPES)}")
        self.scope = scope
        self.coalesces = coalesce and scope != "step"
        self._gathered: dict[int, _GatheredWeight] = {}
        self._in_step = self._is_last = False
        self._deferred_wgrad: list[Callable[[], None]] | None = None
        #: during `run_wgrad`, the weights whose hooks are to be called at its end
        self._accumulated: dict[int, Tensor] | None = None
        self._groups: dict[int, WeightGroup] = {}
        self._coalesced: set[int] = set()

    @property
    def keeps(self) -> bool:
        """Whether backward uses the weight that forward gathered."""
        return self.scope != "matmul"

    def gather(self, weight: Tensor, route: Route) -> Pending:
        """The weight as it is multiplied: its shard moved by ``route.forward``, or what was kept of that."""
        group = self._group_of(weight)
        if group is not None:
            return Ready(group.gather(weight))
        # under selective checkpointing the recorder keeps the gathered weight, and gives it back
        if not (self._in_step and self.scope == "step" and route.forward) or is_recorded():
            return run(route.forward, weight)
        kept, state = self._gathered.get(id(weight)), (weight._version, weight.data_ptr())
        if kept is None or kept.state != state:
            gathered = run(route.forward, weight.detach()).wait()
            gradient = None if kept is None else kept.gradient
            kept = self._gathered[id(weight)] = _GatheredWeight(weight, route, state, gathered, gradient)
        return Ready(kept.gathered)

    def reduce(self, weight: Tensor, gradient: Tensor, route: Route) -> Pending | None:
        """The rank's shard of a weight's gradient, from the wgrad of one multiplication; None when it comes later."""
        group = self._group_of(weight)
        if group is not None:
            return group.reduce(weight, gradient, self.accumulate_grad)
        kept = self._gathered.get(id(weight))
        if kept is None or is_recorded() or weight._backward_hooks:  # hooks are called at each backward
            return run(route.backward, gradient, owned=True)
        kept.gradient = gradient if kept.gradient is None else kept.gradient.add_(gradient)
        if not self._is_last:
            return None
        total, kept.gradient = kept.gradient, None
        return run(route.backward, total, owned=True)

    def _group_of(self, weight: Tensor) -> WeightGroup | None:
        """The weights that this one moves with, within a step; none of them has hooks, which run in each's backward."""
        group = self._groups.get(id(weight)) if self._in_step and not is_recorded() else None
        return None if group is None or group.has_hooks else group

    def is_coalesced(self, weight: Tensor) -> bool:
        """Whether `coalesce` was called for this weight."""
        return id(weight) in self._coalesced

    def coalesce(self, *members: GroupedWeight) -> None:
        """From here on, within steps, gather these weights in one collective, and reduce their gradients in one."""
        self._coalesced.update(id(member.weight) for member in members)
        if self.coalesces and all(member.can_coalesce for member in members):
            groups = {member.route.forward[0].group for member in members}
            dtypes = {member.weight.dtype for member in members}
            if len(groups) == len(dtypes) == 1:
                group = WeightGroup(members)
                self._groups.update({id(member.weight): group for member in members})

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """From here to `end_step` a weight is gathered again only when it changes."""
        self._gathered.clear()
        self._in_step, self._is_last = True, False

    def set_last_microbatch(self, is_last: bool = True) -> None:
        """Whether backwards from here on are those of a step's last microbatch, after which gradients are reduced."""
        self._is_last = is_last

    def flush(self, only: Container[int] | None = None) -> None:
        """Reduce gradients that no backward has (of weights that the last microbatch did not use); free the weights.

        Args:
            only: ids of the weights to flush, of coalesced ones all or none; None: all.
        """
        for key in [key for key in self._gathered if only is None or key in only]:
            kept = self._gathered.pop(key)
            if kept.gradient is not None:
                self.accumulate_grad(kept.weight, run(kept.route.backward, kept.gradient, owned=True).wait())
        for group in dict.fromkeys(self._groups.values()):
            for member in group.members:
                if only is None or id(member.weight) in only:
                    gradient = group.gradients.pop(id(member.weight), None)
                    if gradient is not None:
                        self.accumulate_grad(member.weight, run(member.route.backward, gradient, owned=True).wait())

    def end_step(self) -> None:
        """`flush` all weights, and close the step."""
        try:
            self.flush()
        finally:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Close the step, without reducing what is left."""
        self._gathered.clear()
        for group in self._groups.values():
            group.gathered.clear()
            group.gradients.clear()
        self._in_step = self._is_last = False

    # -- deferred wgrad -----------------------------------------------------------------------------------

    @property
    def defers_wgrad(self) -> bool:
        """Whether backward runs inside of `deferred_wgrad`."""
        return self._deferred_wgrad is not None

    def can_defer_wgrad(self, weight: Tensor) -> bool:
        """Whether wgrad of this weight is left for later. Not with hooks on it: they belong to the usual backward."""
        return self.defers_wgrad and not weight._backward_hooks

    def defer_wgrad(self, task: Callable[[], None]) -> None:
        """Leave ``task``, the wgrad of one use of a weight, to `run_wgrad`."""
        assert self._deferred_wgrad is not None
        self._deferred_wgrad.append(task)

    def accumulate_grad(self, weight: Tensor, gradient: Tensor) -> None:
        """Add a gradient to ``weight.grad`` as autograd would, with the hooks of the weight before and after."""
        _accumulate(weight, gradient)
        if self._accumulated is None:
            _run_grad_hooks(weight)
        else:
            self._accumulated[id(weight)] = weight

    def run_wgrad(self, tasks: list[Callable[[], None]]) -> None:
        """Run the wgrads that `deferred_wgrad` left. Post-accumulate hooks run once for each weight, at the end."""
        self._accumulated = {}
        try:
            for task in tasks:
                task()
        finally:
            accumulated, self._accumulated = self._accumulated, None
        for weight in accumulated.values():
            _run_grad_hooks(weight)

    @contextmanager
    def deferred_wgrad(self) -> Iterator[list[Callable[[], None]]]:
        """Backward inside the block runs dgrad only, and leaves wgrad in the list that the block is given.

        Each entry computes the gradient of one use of a weight, reduces it and adds it to ``weight.grad`` (see
        `run_wgrad`): the separate backward of weights that zero-bubble schedules need (2401.10241).
        """
        outer, self._deferred_wgrad = self._deferred_wgrad, []
        try:
            yield self._deferred_wgrad
        finally:
            self._deferred_wgrad = outer


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """``weight.grad += gradient``, after the weight's hooks."""
    for hook in list((weight._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _run_grad_hooks(weight: Tensor) -> None:
    """Call the post-accumulate hooks of a weight."""
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)
