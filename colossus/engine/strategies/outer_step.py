"""The step that is made of a whole round: the replicas' average against what they began with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def outer_step(
    anchor: Sequence[Tensor],
    average: Sequence[Tensor],
    momentum_buffer: Sequence[Tensor] | None,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    inner_lr: Sequence[float] | None = None,
) -> None:
    """SGD on ``anchor``, in place, with the gradient ``(anchor - average) / inner_lr`` and the rate ``lr * inner_lr``.

    With an inner rate that is slow momentum (1910.00643, algorithm 1), without one the outer step of DiLoCo
    (2311.08105).

    Args:
        anchor, average, momentum_buffer: of each parameter; ``average`` is overwritten. Without a buffer there is no
            momentum.
        inner_lr: of each parameter, the mean over the round. Where it is 0 nothing has moved.
    """
    if not anchor:
        return
    anchor, gradient = list(anchor), list(average)
    torch._foreach_neg_(gradient)
    torch._foreach_add_(gradient, anchor)
    if inner_lr is not None:
        torch._foreach_mul_(gradient, [1 / rate if rate else 0.0 for rate in inner_lr])
    if momentum_buffer is not None:
        buffer = list(momentum_buffer)
        torch._foreach_mul_(buffer, momentum)
        torch._foreach_add_(buffer, gradient)
        if nesterov:
            torch._foreach_add_(gradient, buffer, alpha=momentum)
        else:
            torch._foreach_copy_(gradient, buffer)
    rates = [lr] * len(anchor) if inner_lr is None else [lr * rate for rate in inner_lr]
    torch._foreach_mul_(gradient, rates)
    torch._foreach_sub_(anchor, gradient)
