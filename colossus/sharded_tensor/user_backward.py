"""Gradients for users' hooks and autograd functions in backward: split as their tensors are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

#: for each thread: whether a user's hook runs, and tensors that forwards of autograd functions may have returned
_thread = threading.local()
#: a function of (tensor, placement) that marks the tensor as split
Mark = Callable[[Tensor, Any], Tensor]


def runs_user_backward() -> bool:
    """Return whether the backward of a user's autograd function runs. Functions in hooks are refused as in forwards."""
    return torch._C._current_graph_task_id() != -1 and not getattr(_thread, "runs_hook", False)


def split_hook(
    hook: Callable[[Tensor], Tensor | None], placement: Any, mark: Mark
) -> Callable[[Tensor], Tensor | None]:
    """Return a hook that calls the user's with a gradient that is split as its tensor is."""

    def call(grad: Tensor) -> Tensor | None:
        _thread.runs_hook = True
        try:
            changed = hook(mark(grad, placement))
        finally:
            _thread.runs_hook = False
        return None if changed is None else _plain(changed)

    return call


def note_made(out: Any) -> None:
    """Note split tensors that were computed without a graph from tensors that have one.

    The forward of an autograd function may return one of them, which then gets a graph.
    """
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
        made = [weakref.ref(x) for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
        alive = [ref for ref in getattr(_thread, "made", ()) if ref() is not None]
        _thread.made = [*alive, *made]


def has_made() -> bool:
    """Return whether there are noted tensors, which an autograd function may have returned by now."""
    return not torch.compiler.is_compiling() and bool(getattr(_thread, "made", ())) and torch.is_grad_enabled()


def split_gradients_of_made(mark: Mark) -> None:
    """Mark the gradients of tensors that autograd functions have returned as split like those tensors."""
    for made in _thread.made:
        x = made()
        node = x.grad_fn if x is not None and not x.placement.is_whole else None
        if isinstance(node, BackwardCFunction):
            node.register_prehook(partial(_marked, mark, x.output_nr, x.placement))
            node.register_hook(lambda grads, _: tuple(map(_plain, grads)))
    _thread.made = ()


def _marked(mark: Mark, index: int, placement: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(
        mark(grad, placement) if number == index and grad is not None else grad for number, grad in enumerate(grads)
    )


def _plain(x: Any) -> Any:
    if not isinstance(x, Tensor) or type(x) is Tensor:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)
