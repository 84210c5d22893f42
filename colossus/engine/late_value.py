"""A number of each step that nobody may wait for."""

from __future__ import annotations

from torch import Tensor

from colossus.gradients.host_read import HostRead


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
