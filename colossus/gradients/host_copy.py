"""Copies from the host to a device that nobody waits for."""

from __future__ import annotations

import torch
from torch import Tensor


def send_to(device: torch.device, x: Tensor) -> Tensor:
    """A tensor of the host on a device: the host goes on, and what the device is told next finds it there.

    From pinned memory: from other memory the host would wait until the device has come to the copy. torch keeps pinned
    memory until the copy is over.
    """
    if device.type == "cpu" or x.layout is not torch.strided:
        return x.to(device)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)
