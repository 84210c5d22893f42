"""Updates that an accelerator leaves out where a gradient is not finite, without being waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def _skipped_where(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """As `torch.amp.GradScaler` tells a fused optimizer that its step may have to change nothing."""
    optimizer.grad_scale, optimizer.found_inf = None, found_inf.float()
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def skipping_on_device(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> AbstractContextManager[None] | None:
    """Around a step that an accelerator leaves out where ``found_inf``, without being waited for.

    None where that is to be waited for: on the CPU, where it costs nothing; with parameters that are elsewhere, or an
    optimizer that is not fused; and in the first step of a parameter, in which torch would leave a momentum of SGD
    without a value.
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
