"""ZB-H1 (zero bubble, 2401.10241): 1F1B with a split backward, the weight gradients filling the cool-down.

The gradient of a stage's input (dgrad) is sent as soon as it is made; rank r defers the gradients of its weights
(wgrad) by r microbatches, and so has them left to do while the pipeline drains. No rank holds more activations than
the first rank of 1F1B. When dgrad and wgrad each take as long as a forward, the bubble is (p - 1) / (3 m + p - 1).
"""

from __future__ import annotations

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions
from colossus.schedule.build import bounded
from colossus.schedule.builtin.one_f_one_b import one_f_one_b


@SCHEDULES.register("zb-h1")
@bounded(lambda stages, microbatches: [min(stages, microbatches)] * stages)
def zb_h1(stages: int, microbatches: int) -> Actions:
    """Rank r has stage r."""
    if stages == 1:
        return one_f_one_b(stages, microbatches)
    out: Actions = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, microbatches)
        actions = [Action("forward", stage, index) for index in range(warm_up)]
        for index in range(microbatches):
            if warm_up + index < microbatches:
                actions.append(Action("forward", stage, warm_up + index))
            actions.append(Action("backward_input", stage, index))
            if index >= stage:
                actions.append(Action("backward_weight", stage, index - stage))
        deferred = range(max(0, microbatches - stage), microbatches)
        out.append([*actions, *(Action("backward_weight", stage, index) for index in deferred)])
    return out
