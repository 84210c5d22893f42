"""ZB-H1 (zero bubble, 2401.10241): 1F1B with the backward in halves, those of the weights filling the tail.

The gradient of a stage's input goes on its way as soon as it is there; rank r is r microbatches late with the
gradients of its weights, which it then has left to do while the pipeline drains. No rank holds more activations
than the first rank of 1F1B. When the halves take as long as a forward, the bubble is (p - 1) / (3 m + p - 1).
"""

from __future__ import annotations

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions
from colossus.schedule.build import bounded, complete
from colossus.schedule.builtin.one_f_one_b import one_f_one_b


@SCHEDULES.register("zb-h1")
@bounded(lambda stages, microbatches: [min(stages, microbatches)] * stages)
def zb_h1(stages: int, microbatches: int) -> Actions:
    """Rank r has stage r."""
    if stages == 1:
        return one_f_one_b(stages, microbatches)
    out: Actions = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        actions = [Action("forward", stage, index) for index in range(ahead)]
        for index in range(microbatches):
            if ahead + index < microbatches:
                actions.append(Action("forward", stage, ahead + index))
            actions.append(Action("backward_input", stage, index))
            if index >= stage:
                actions.append(Action("backward_weight", stage, index - stage))
        late = range(max(0, microbatches - stage), microbatches)
        out.append([*actions, *(Action("backward_weight", stage, index) for index in late)])
    return complete(out)
