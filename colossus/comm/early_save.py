"""Saving for backward before the rest of a forward is done: where activations are recomputed, that rest is left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus import torch_versions

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def is_hooked() -> bool:
    """Whether activation checkpointing or other `saved_tensors_hooks` take over what is saved for backward."""
    return _top_hooks(True) is not None


def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
    """``ctx.save_for_backward``, in a recomputation at once.

    torch packs what a forward saves when the forward is over. Non-reentrant activation checkpointing
    (`torch.utils.checkpoint`) ends a recomputation as soon as the last tensor that backward needs is packed: to be over
    before a product and its collective that nothing needs any more, it must be packed before these. In a first pass
    this is ``ctx.save_for_backward`` and costs nothing; what is saved, and in what order, is the same in both.
    Where torch cannot (2.11), a recomputation runs that rest, too.
    """
    make = torch_versions.make_saved_tensor
    is_first = torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
    if is_first or make is None or not is_hooked():
        ctx.save_for_backward(*tensors)
        return
    ctx.saved_early = [None if tensor is None else make(tensor, is_output=False) for tensor in tensors]


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """The tensors, or None, that `save_for_backward` has saved. Under checkpointing this runs a user's forward."""
    early = getattr(ctx, "saved_early", None)
    if early is None:
        return ctx.saved_tensors
    return tuple(None if saved is None else saved.unpack() for saved in early)
