"""The report of two records as text, and the command that prints it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from colossus.arithmetic import counted, listed
from colossus.verify.compare_records import Comparison, Difference, compare
from colossus.verify.difference_picture import picture
from colossus.verify.record_folder import Record, RecordError
from colossus.verify.run_verify import AGREE, DIFFERENT, USAGE

#: kind -> (its plural, the title of a difference)
_KINDS = {
    "start": ("initial values", "the initial value of {}"),
    "data": ("batches", "the samples"),
    "loss": ("losses", "the loss"),
    "gradient": ("gradients", "the gradient of {}"),
    "norm": ("norms", "the norm of the gradients"),
    "weight": ("updates of weights", "{} after the optimizer"),
}
#: what to look at where the numbers tell no cause
_HINTS = {
    "start": "the same seed does not give the same values in another framework: load both from one file",
    "data": "nothing behind it was compared: both runs must see the same samples, in any order and on any rank",
    "loss": "the gradients agree, so the loop only tells its loss in another way (a mean of one rank, or a sum)",
    "gradient": "the outputs of no module could be compared: record them on whole activations to see which comes first",
    "norm": "the gradients agree, but the loop clips by another norm than theirs",
    "weight": "the gradients agree: look at the optimizer's options, at its groups of parameters, and at clipping",
}


def run(run: str, others: Sequence[str], tolerance: float | None) -> int:
    """Compare two records, and print the report.

    Args:
        run: folder of the record in question.
        others: one folder, of the record that is taken as right.
        tolerance: relative difference that is allowed; None: what rounding explains.

    Returns:
        0 agree, 3 differ, 2 for what cannot be compared.
    """
    if len(others) != 1:
        print(
            f"colossus: {run} is a record: name the one that is taken as right behind it: colossus verify {run} OTHER",
            file=sys.stderr,
        )
        return USAGE
    try:
        mine, reference = Record(run), Record(others[0])
        if min(mine.steps, reference.steps) < 1:
            short = mine if mine.steps < 1 else reference
            raise RecordError(f"{short.folder}: no step was recorded: no optimizer of torch stepped in its block")
        result = compare(mine, reference, tolerance)
    except RecordError as error:
        print(f"colossus: {error}", file=sys.stderr)
        return USAGE
    print("\n".join(render(result, mine, reference)))
    return DIFFERENT if result.differing else AGREE


def render(result: Comparison, run: Record, reference: Record) -> list[str]:
    """Return the lines of the report."""
    of = f"{run.folder} ({counted(run.world, 'rank')}) and {reference.folder} ({counted(reference.world, 'rank')})"
    if not result.differing:
        lines = [f"AGREE: {of} over {counted(result.steps, 'step')}, up to rounding in {result.dtype}"]
    else:
        lines = _difference(result, of)
        if rows := picture(result.compared):
            kind = _KINDS[result.differing[0].kind][0]
            lines += ["", f"{kind} by module, the worst of each; rounding explains what ends before |", *rows]
    lines += ["", f"{'agree':<20} {'number':>7}  largest difference"] if result.agree else []
    return lines + [
        f"{_KINDS[kind][0]:<20} {number:>7}  {largest:.2g}"
        for kind, (number, largest) in result.agree.items()
        if number
    ]


def _difference(result: Comparison, of: str) -> list[str]:
    first = _most_telling(result.differing)
    step = f"at step {first.step}" if first.step else "from the start"
    lines = [f"DIFFERENT {step}: {_KINDS[first.kind][1].format(first.name)}", f"  {of}"]
    if first.relative < float("inf"):
        lines.append(
            f"  relative difference {first.relative:.3g}; rounding in {result.dtype} explains {first.bound:.2g}"
        )
    shown = first.lines[:1] if result.place else first.lines  # what comes before explains the gradients
    lines += [f"  {line}" for line in shown if line]
    if result.cause:
        lines.append(f"  {result.cause}")
    lines += [f"  {line}" for line in result.place]
    others = [item.name for item in result.differing if item is not first]
    if others:
        total = result.agree.get(first.kind, (0, 0.0))[0] + len(result.differing)
        lines.append(f"  then also: {listed(others)} ({len(result.differing)} differ)" if total else "")
    if not result.cause and not result.place and len(first.lines) < 2:
        lines.append(f"  {_HINTS[first.kind]}")
    return lines


def _most_telling(differences: Sequence[Difference]) -> Difference:
    """Return the first difference whose numbers tell a cause, else the first."""
    return next((item for item in differences if len(item.lines) > 1), differences[0])
