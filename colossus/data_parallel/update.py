"""The update of a step: scaling and clipping of gradients, and steps that an accelerator skips by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossus.gradients.gradient_norm import values_of


def scale_gradients(params: Iterable[nn.Parameter], scale: Tensor, clip_value: float | None = None) -> None:
    """Multiply all gradients in place, then clip their elements to ``clip_value`` in absolute value, unless None."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            grad = values_of(param.grad)
            kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for (dtype, device), grads in kinds.items():
        torch._foreach_mul_(grads, scale.to(device, dtype))
        if clip_value is not None:
            if dtype.is_complex:  # the real and imaginary parts
                grads = [torch.view_as_real(grad) for grad in grads]
            torch._foreach_clamp_max_(grads, clip_value)
            torch._foreach_clamp_min_(grads, -clip_value)


@contextmanager
def _skipped_where(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """Make the steps of a fused optimizer inside change nothing where ``found_inf``, as `torch.amp.GradScaler` does."""
    optimizer.grad_scale, optimizer.found_inf = None, found_inf.float()
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def skipping_on_device(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> AbstractContextManager[None] | None:
    """Return a context in which an accelerator skips a step where ``found_inf``, while the host does not wait.

    None where the host has to read ``found_inf`` instead: on the CPU, where that costs nothing; for parameters on
    another device, or an optimizer that is not fused; and in the first step of a parameter, in which torch would leave
    a momentum of SGD without a value.
    """
    if found_inf.device.type == "cpu" or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return None
    for group in optimizer.param_groups:
        if any(param.device != found_inf.device for param in group["params"]):
            return None
        keeps_state = group.get("momentum", 1) != 0
        if keeps_state and any(param.grad is not None and param not in optimizer.state for param in group["params"]):
            return None
    return _skipped_where(optimizer, found_inf)
