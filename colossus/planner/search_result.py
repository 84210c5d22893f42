"""The result of a search of plans. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.arithmetic import byte_count, counted
from colossus.planner.plan_estimate import PlanEstimate


@dataclass(frozen=True)
class SearchResult:
    """The plans that fit model, batch, devices and memory.

    Attributes:
        plans: the plans, the best first.
        tried: number of plans that were estimated, or ruled out by a bound.
        nearest: the plan that exceeds the memory least, if none fits.
        seconds: seconds of the search.
        stopped: whether Ctrl-C ended the search early.
    """

    plans: list[PlanEstimate]
    tried: int
    nearest: PlanEstimate | None
    seconds: float
    stopped: bool = False

    def nothing_fits(self, devices: int, memory: float) -> str:
        """Say that no plan fits, and how much the nearest one needs.

        Args:
            devices: number of devices.
            memory: bytes of each device.
        """
        assert self.nearest is not None
        needed = self.nearest.memory
        most, size = max(needed.fullest.kinds.items(), key=lambda kind: kind[1])
        return (
            f"no plan for {counted(devices, 'device')} of {byte_count(memory)} fits ({self.tried:,} tried). The "
            f"nearest needs {byte_count(needed.fullest.total)} on {needed.fullest_rank}, "
            f"{byte_count(needed.fullest.total - memory)} too much; {byte_count(size)} of it are {most}"
        )
