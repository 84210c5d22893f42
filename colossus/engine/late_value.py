"""A number of each step that nobody may wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LateValue:
    """Reads a scalar of each step: at once where that costs nothing, on an accelerator one step late.

    All ranks see the same value after the same step.
    """

    def __init__(self) -> None:
        #: the last one on its way from an accelerator, and the event of its arrival
        self._on_its_way: tuple[Tensor, Any] | None = None

    def push(self, value: Tensor) -> float | None:
        """Hand in a step's scalar.

        Returns:
            Its value; on an accelerator that of the step before, None for the first.
        """
        if value.device.type == "cpu":
            return value.item()
        arrived, self._on_its_way = self._on_its_way, None
        host = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._on_its_way = host, event
        if arrived is None:
            return None
        arrived[1].synchronize()
        return arrived[0].item()
