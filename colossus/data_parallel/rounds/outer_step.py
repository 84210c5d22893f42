"""The step that is made of a whole round: the replicas' average against what they began with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.data_parallel.rounds.fragments import Fragment


@torch.no_grad()
def outer_step(
    fragment: Fragment,
    average: Tensor,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    inner_lr: Sequence[float] | None = None,
) -> None:
    """SGD on the fragment's anchor, with the gradient ``(anchor - average) / inner_lr`` and the rate ``lr * inner_lr``.

    With an inner rate that is slow momentum (1910.00643, algorithm 1), without one the outer step of DiLoCo
    (2311.08105).

    Args:
        average: bytes of the fragment's vector; overwritten with what the anchor is then.
        inner_lr: of each parameter, the mean over the round. Where it is 0 nothing has moved.
    """
    anchor, gradient = fragment.anchor, fragment.vector.views(average)
    assert anchor is not None
    if not anchor:
        return
    if fragment.momentum is None and momentum:
        fragment.momentum = [torch.zeros_like(value) for value in anchor]
    torch._foreach_neg_(gradient)
    torch._foreach_add_(gradient, anchor)
    if inner_lr is not None:
        torch._foreach_mul_(gradient, [1 / rate if rate else 0.0 for rate in inner_lr])
    if (buffer := fragment.momentum) is not None:
        torch._foreach_mul_(buffer, momentum)
        torch._foreach_add_(buffer, gradient)
        if nesterov:
            torch._foreach_add_(gradient, buffer, alpha=momentum)
        else:
            torch._foreach_copy_(gradient, buffer)
    rates = [lr] * len(anchor) if inner_lr is None else [lr * rate for rate in inner_lr]
    torch._foreach_mul_(gradient, rates)
    torch._foreach_sub_(anchor, gradient)
    torch._foreach_copy_(fragment.vector.views(average), anchor)
