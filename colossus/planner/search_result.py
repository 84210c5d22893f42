"""The result of a search of plans. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        usual: plans that people run by the name of their kind, with the least recomputation that fits, and those that
            do not fit in any way.
    """

    plans: list[PlanEstimate]
    tried: int
    nearest: PlanEstimate | None
    seconds: float
    stopped: bool = False
    usual: Mapping[str, PlanEstimate] = field(default_factory=dict)

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
