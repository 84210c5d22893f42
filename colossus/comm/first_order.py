"""Backwards that cannot be differentiated again, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from colossus.error_place import located_error


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
