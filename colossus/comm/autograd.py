"""What autograd functions and collectives have to know of torch: whether operations are traced, recorded or recomputed,
what is saved for backward and when, and what cannot be differentiated twice or compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from colossus import torch_versions
from colossus.error_place import located_error

P = ParamSpec("P")
T = TypeVar("T")

_FAKE_TENSORS = torch._C._TorchDispatchModeKey.FAKE
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def is_recorded() -> bool:
    """Whether tensor operations are being traced or recorded by a dispatch mode. Fake tensors among fake ranks are not:
    there the collectives are those that real ones take."""
    if torch.compiler.is_compiling():
        return True
    num_modes = torch._C._len_torch_dispatch_stack()
    if num_modes == 1 and torch._C._get_dispatch_mode(_FAKE_TENSORS) is not None:
        return not (dist.is_initialized() and dist.get_backend() == dist.Backend.FAKE)
    return num_modes > 0


def is_hooked() -> bool:
    """Whether activation checkpointing or other `saved_tensors_hooks` take over what is saved for backward."""
    return _top_hooks(True) is not None


def is_recomputation() -> bool:
    """Whether this forward runs inside of a backward, as those of activation checkpointing do the second time."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
    """``ctx.save_for_backward``, in a recomputation at once.

    torch packs what a forward saves when the forward is over. Non-reentrant activation checkpointing
    (`torch.utils.checkpoint`) ends a recomputation as soon as the last tensor that backward needs is packed: to be over
    before a product and its collective that nothing needs any more, it must be packed before these. In a first pass
    this is ``ctx.save_for_backward`` and costs nothing; what is saved, and in what order, is the same in both.
    Where torch cannot (2.11), a recomputation runs that rest, too.
    """
    make = torch_versions.make_saved_tensor
    if not is_recomputation() or make is None or not is_hooked():
        ctx.save_for_backward(*tensors)
        return
    ctx.saved_early = [None if tensor is None else make(tensor, is_output=False) for tensor in tensors]


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """The tensors, or None, that `save_for_backward` has saved. Under checkpointing this runs a user's forward."""
    early = getattr(ctx, "saved_early", None)
    if early is None:
        return ctx.saved_tensors
    return tuple(None if saved is None else saved.unpack() for saved in early)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable`` for the backward of an autograd function, in words and at once.

    torch's own fails where the second backward arrives, far from the line that asked for it; and where the gradient
    that came in is a constant (of a sum, say), it gives a second derivative that lacks a term.

    Raises:
        ValueError: in a backward with ``create_graph=True``.
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
    """``torch.compiler.disable``, which imports ``torch._dynamo`` (1.6 s) only where something is being compiled."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
