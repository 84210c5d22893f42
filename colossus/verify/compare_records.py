"""Two records beside each other: the first step and kind of value that differ by more than rounding explains."""

from __future__ import annotations

from dataclasses import dataclass, field

from colossus.verify.record_folder import Record
from colossus.verify.step_comparison import Difference, StepComparison


@dataclass
class Comparison:
    """The result.

    Attributes:
        agree: kind -> number of values that agree, and their largest relative difference.
        differing: the values that differ, of the first kind in the first step that has any.
        compared: all values of that kind in that step.
        cause: what explains all of them at once.
        place: lines about the first module whose output differs.
        steps: steps of both records.
        dtype: the coarsest dtype of outputs in either record.
    """

    agree: dict[str, tuple[int, float]] = field(default_factory=dict)
    differing: list[Difference] = field(default_factory=list)
    compared: list[Difference] = field(default_factory=list)
    cause: str = ""
    place: list[str] = field(default_factory=list)
    steps: int = 0
    dtype: str = ""


def compare(run: Record, reference: Record, tolerance: float | None = None) -> Comparison:
    """Compare two records step by step until a kind of value differs.

    Args:
        run: the record in question.
        reference: the record that is taken as right: one process, another plan, or another framework.
        tolerance: relative difference that is allowed in place of the estimate of rounding.
    """
    result = Comparison(steps=min(run.steps, reference.steps))
    before: StepComparison | None = None
    for step in range(result.steps + 1):
        mine, theirs = ([record.rank_step(step, rank) for rank in range(record.world)] for record in (run, reference))
        comparer = StepComparison(step, mine, theirs, tolerance, before)
        result.dtype = comparer.dtype_name
        for kind, differences in comparer.kinds():
            wrong = [item for item in differences if not item.relative <= item.bound]
            if wrong:
                result.differing = wrong
                result.compared = differences[::-1] if kind == "gradient" else differences  # in the order of the model
                if kind in ("gradient", "loss"):
                    outputs = comparer.outputs()
                    result.place = outputs.first_that_differs(comparer.bound, run.world)
                    if not result.place:  # else a difference of gradients follows from that of outputs
                        result.cause = comparer.cause(kind)
                    if not result.place and not result.cause and all(len(item.lines) < 2 for item in wrong):
                        result.place = comparer.behind_outputs(len(outputs.apart), len(wrong) == len(differences))
                return result
            count, largest = result.agree.get(kind, (0, 0.0))
            result.agree[kind] = count + len(differences), max([largest, *(item.relative for item in differences)])
        before = comparer
    return result
