"""Weight gradients left for later: the separate backward of weights that zero-bubble schedules need (2401.10241)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor


class WgradDeferral:
    """Inside of `deferred`, backward runs dgrad only; wgrad is left in a list, for `run`."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], None]] | None = None
        #: during `run`, the weights whose hooks are to be called at its end
        self._accumulated: dict[int, Tensor] | None = None

    @property
    def is_active(self) -> bool:
        """Whether backward runs inside of `deferred`."""
        return self._tasks is not None

    def takes(self, weight: Tensor) -> bool:
        """Whether wgrad of this weight is left for later. Not with hooks on it: they belong to the usual backward."""
        return self.is_active and not weight._backward_hooks

    @contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Around a backward: the list gets one entry for each use of a weight.

        An entry computes the gradient of that use, reduces it and adds it to ``weight.grad``.
        """
        outer, self._tasks = self._tasks, []
        try:
            yield self._tasks
        finally:
            self._tasks = outer

    def defer(self, task: Callable[[], None]) -> None:
        """Leave ``task``, the wgrad of one use of a weight, to `run`."""
        assert self._tasks is not None
        self._tasks.append(task)

    def run(self, tasks: list[Callable[[], None]]) -> None:
        """Run what `deferred` left. Post-accumulate hooks run once for each weight, at the end."""
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
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        if self._accumulated is None:
            run_grad_hooks(weight)
        else:
            self._accumulated[id(weight)] = weight


def run_grad_hooks(weight: Tensor) -> None:
    """Call the post-accumulate hooks of a weight."""
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)
