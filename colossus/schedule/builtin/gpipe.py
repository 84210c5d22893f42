"""Fill-drain (GPipe, 1811.06965): all forwards, then all backwards. Keeps every microbatch in flight."""

from __future__ import annotations

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions
from colossus.schedule.build import bounded


@SCHEDULES.register("gpipe")
@bounded(lambda stages, microbatches: [microbatches] * stages)
def gpipe(stages: int, microbatches: int) -> Actions:
    """Rank r has stage r."""
    return [
        [
            *(Action("forward", stage, index) for index in range(microbatches)),
            *(Action("backward", stage, index) for index in range(microbatches)),
        ]
        for stage in range(stages)
    ]
