"""Fill-drain (GPipe, 1811.06965): all forwards, then all backwards. Keeps every microbatch in flight."""

from __future__ import annotations

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions


@SCHEDULES.register("gpipe")
def gpipe(stages: int, microbatches: int) -> Actions:
    """Forward and backward order of every stage."""
    return [
        [
            *(Action("forward", stage, index) for index in range(microbatches)),
            *(Action("backward", stage, index) for index in range(microbatches)),
            Action("reduce", stage),
        ]
        for stage in range(stages)
    ]
