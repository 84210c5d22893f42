"""Numbers that travel from an accelerator to the host, and tensors the other way, while both go on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostRead:
    """A tensor on its way to the host, behind what its device was told to do before, and before what it is told since.

    Whoever reads it waits for its arrival alone: with the numbers of the step before, where the device has a step to
    do, nobody waits long, and the device never. A tensor of the CPU is there at once. Several threads may read it.
    """

    def __init__(self, values: Tensor) -> None:
        self._host, self._arrived = values.detach(), None
        if values.device.type != "cpu":
            module: Any = torch.get_device_module(values.device)
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = module.Event()
            self._arrived.record(module.current_stream(values.device))  # that of the copy, whatever the current device

    @property
    def is_there(self) -> bool:
        """Whether nobody would wait for it."""
        arrived = self._arrived
        return arrived is None or bool(arrived.query())

    def wait(self) -> Tensor:
        """The tensor on the host."""
        arrived = self._arrived
        if arrived is not None:
            arrived.synchronize()
            self._arrived = None
        return self._host


class LateValue:
    """Reads a scalar of each step: at once where that costs nothing, on an accelerator one step late.

    All ranks see the same value after the same step.
    """

    def __init__(self) -> None:
        #: the last one on its way from an accelerator
        self._on_its_way: HostRead | None = None

    def push(self, value: Tensor) -> float | None:
        """Hand in a step's scalar.

        Returns:
            Its value; on an accelerator that of the step before, None for the first.
        """
        if value.device.type == "cpu":
            return value.item()
        before, self._on_its_way = self._on_its_way, HostRead(value)
        return None if before is None else before.wait().item()


def send_to(device: torch.device, x: Tensor) -> Tensor:
    """A tensor of the host on a device: the host goes on, and what the device is told next finds it there.

    From pinned memory: from other memory the host would wait until the device has come to the copy. torch keeps pinned
    memory until the copy is over.
    """
    if device.type == "cpu" or x.layout is not torch.strided:
        return x.to(device)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)
