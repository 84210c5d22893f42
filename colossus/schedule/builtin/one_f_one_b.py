"""1F1B (PipeDream-Flush, 2006.09503): after a warm-up, one forward and one backward in turn.

At most min(stages - stage, microbatches) microbatches are in flight on a stage. With one stage this is plain
gradient accumulation: forward and backward of one microbatch after the other.
"""

from __future__ import annotations

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions
from colossus.schedule.build import bounded


@SCHEDULES.register("1f1b")
@bounded(lambda stages, microbatches: [min(stages - stage, microbatches) for stage in range(stages)])
def one_f_one_b(stages: int, microbatches: int) -> Actions:
    """Rank r has stage r."""
    out: Actions = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, microbatches)
        actions = [Action("forward", stage, index) for index in range(warm_up)]
        for index in range(microbatches - warm_up):
            actions.append(Action("forward", stage, warm_up + index))
            actions.append(Action("backward", stage, index))
        actions += [Action("backward", stage, index) for index in range(microbatches - warm_up, microbatches)]
        out.append(actions)
    return out
