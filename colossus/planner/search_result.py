"""What a search of plans has found. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.arithmetic import byte_count, counted
from colossus.planner.plan_estimate import PlanEstimate


@dataclass(frozen=True)
class SearchResult:
    """Plans that fit model, batch, devices and memory.

    Attributes:
        plans: best first.
        tried: how many were estimated or ruled out by a bound.
        nearest: where none fits, the one that misses least.
        seconds: of the search.
        stopped: by Ctrl-C, before all plans were tried.
    """

    plans: list[PlanEstimate]
    tried: int
    nearest: PlanEstimate | None
    seconds: float
    stopped: bool = False

    def nothing_fits(self, devices: int, memory: float) -> str:
        """What the nearest plan misses, in words.

        Args:
            memory: bytes of each device.
        """
        assert self.nearest is not None
        needed = self.nearest.memory
        most, size = max(needed.fullest.kinds.items(), key=lambda kind: kind[1])
        return (
            f"no plan of {counted(devices, 'device')} of {byte_count(memory)} fits ({self.tried:,} tried). The nearest "
            f"needs {byte_count(needed.fullest.total)} on {needed.fullest_rank}, "
            f"{byte_count(needed.fullest.total - memory)} more than there is; {byte_count(size)} of it are {most}"
        )
