"""Numbers that travel from an accelerator to the host while both go on."""

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
