"""What a search of plans has found. No torch."""

from __future__ import annotations

from dataclasses import dataclass

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
