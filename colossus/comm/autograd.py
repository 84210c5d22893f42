"""Helpers for autograd functions that run collectives.

They answer whether operations are being traced, recorded or recomputed, save tensors for backward, and guard what
cannot be differentiated twice or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from colossus import torch_versions
from colossus.comm.kept_results import KeptResults, keeps_results
from colossus.error_place import located_error

P = ParamSpec("P")
T = TypeVar("T")

_FAKE_TENSORS = torch._C._TorchDispatchModeKey.FAKE
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def is_recorded() -> bool:
    """Return whether a compiler or a dispatch mode is tracing or recording tensor operations.

    Selective activation checkpointing does not count, since it records no operation inside of a collective. Fake
    tensors among fake ranks do not count: collectives take the same way there as those of real ranks.
    """
    if torch.compiler.is_compiling():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, KeptResults)]
    if len(modes) == 1 and torch._C._get_dispatch_mode(_FAKE_TENSORS) is not None:
        return not (dist.is_initialized() and dist.get_backend() == dist.Backend.FAKE)
    return bool(modes)


def is_hooked() -> bool:
    """Return whether activation checkpointing or other `saved_tensors_hooks` handle what is saved for backward."""
    return _top_hooks(True) is not None


def is_recomputation() -> bool:
    """Return whether this forward runs inside a backward, as the recomputation of activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors as ``ctx.save_for_backward`` does; under activation checkpointing, pack them at once.

    torch packs what a forward saves when that forward has returned. Non-reentrant activation checkpointing
    (`torch.utils.checkpoint`) ends a recomputation as soon as the last tensor that backward needs is packed. Packing
    at once therefore skips the matmul and the collective that come after the call and whose result nobody needs.

    Under selective checkpointing the first pass does the same, so that `KeptResults` sees which results come after the
    last packed tensor. Else it calls ``ctx.save_for_backward`` and costs nothing more. Both passes save the same
    tensors in the same order. torch 2.11 cannot pack early: there a recomputation runs to its end.
    """
    make = torch_versions.make_saved_tensor
    if not (is_recomputation() or keeps_results()) or make is None or not is_hooked():
        ctx.save_for_backward(*tensors)
        return
    ctx.saved_early = [None if tensor is None else make(tensor, is_output=False) for tensor in tensors]


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return what `save_for_backward` has saved; under checkpointing this recomputes a user's forward."""
    early = getattr(ctx, "saved_early", None)
    if early is None:
        return ctx.saved_tensors
    return tuple(None if saved is None else saved.unpack() for saved in early)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of an autograd function raise when it is to be differentiated again.

    torch's ``once_differentiable`` raises in the second backward only, far from the line that asked for it. Where the
    incoming gradient is a constant (that of a sum, say), it even returns a second derivative that lacks a term.

    Raises:
        ValueError: the backward runs with ``create_graph=True``.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():
            return once(ctx, *grads)
        raise located_error(
            "a gradient is to be differentiated again (create_graph=True: forces, gradient penalties, Hessians), and "
            "it comes through a layer of colossus whose backward runs collectives and has no derivative of its own. "
            "Take torch's layers (torch.nn.Linear, ...) for what is differentiated twice: they work under every plan, "
            "with whole weights on every rank"
        )

    return checked


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Do as ``torch.compiler.disable``, but import ``torch._dynamo`` (1.6 s) only while something is compiled."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
