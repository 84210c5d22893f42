"""The findings of all ranks in the order in which one thing follows from another, as text. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus.config import Config
from colossus.config.plans import describe_plan, name_of, world_size
from colossus.context.grid import RankGrid

MOST_NAMES = 4

#: kind of what is compared, in the order in which one follows from the other -> its name in the table, and what to
#: look for where the first difference is of this kind
KINDS = {
    "start": (
        "initial values",
        "initial values depend on the seed, the parameter's name and its full shape; this one depends on the plan",
    ),
    "data": (
        "samples",
        "nothing of the model was compared: the data itself depends on the number of processes, or on chance",
    ),
    "output": (
        "outputs of modules",
        "so it is the forward of this module, or what its caller does before it, that depends on the plan",
    ),
    "count": (
        "numbers of valid samples",
        "the loss function returns (sum, count): count is the number of valid samples of what it was given",
    ),
    "loss": (
        "losses",
        "the outputs agree: the loss is a sum over the samples it was given, so no mean and no term per call",
    ),
    "gradient": (
        "gradients",
        "the outputs and the loss agree, so it is the backward, where this is the first that differs",
    ),
    "norm": (
        "gradient norms",
        "the gradients agree, but their norm does not: an element is counted twice or not at all",
    ),
    "weight": (
        "weights after a step",
        "the gradients agree: the optimizer must work element by element, since ranks hold shards of parameters",
    ),
}
_TITLES = {
    "start": "the initial value of {}",
    "data": "the samples",
    "output": "the output of {}",
    "count": "the number of valid samples of the global batch",
    "loss": "the loss",
    "gradient": "the gradient of {}",
    "norm": "the gradient norm",
    "weight": "{} after the optimizer",
}
_FLOAT32 = 1e-5


@dataclass(frozen=True)
class Finding:
    """One thing that was compared on one rank.

    Attributes:
        kind: of `KINDS`.
        step: 0 before the first.
        place: in the order of its kind: a forward's, or of gradients a backward's.
        relative: norm of the difference over the scale; infinite where the two cannot be compared.
        absolute: the largest difference of an element, where that is, and the values there; of an output the norms of
            the sample.
        factor: all elements are as many times those of one process.
        stage: of an output, the pipeline stage that computed it.
        details: lines that describe it.
    """

    kind: str
    step: int
    name: str = ""
    place: int = 0
    rank: int = 0
    relative: float = 0.0
    absolute: float = 0.0
    index: Sequence[int] = ()
    sample: int | None = None
    plan: float = 0.0
    reference: float = 0.0
    factor: float | None = None
    stage: int = 0
    details: Sequence[str] = ()


@dataclass
class Agreement:
    """What was compared of one kind: how many, and the largest relative difference with its place."""

    names: set[tuple[int, str]] = field(default_factory=set)
    largest: float = 0.0
    where: str = ""

    def add(self, finding: Finding) -> None:
        self.names.add((finding.step, finding.name))
        if finding.relative > self.largest:
            words = [finding.name, f"step {finding.step}" if finding.step else "", f"rank {finding.rank}"]
            self.largest, self.where = finding.relative, ", ".join(filter(None, words))


@dataclass
class Verdict:
    """What the comparison found.

    Attributes:
        agreements: kind -> what agrees of it before the first that differs.
        differing: findings beyond the tolerance of the first kind, in the first step, that has any; in order.
        before: name of what was compared last before the first of them.
        ranks: what each rank has written.
    """

    agreements: dict[str, Agreement]
    differing: list[Finding]
    before: str
    ranks: list[dict[str, Any]]


def read(folder: Path, num_ranks: int, steps: int, tolerance: float) -> Verdict:
    """Read what the hooks of both runs have written."""
    reference = json.loads((folder / "reference.json").read_text())
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    findings = [Finding(**each) for rank in ranks for each in rank["findings"]]
    found = {each.name for each in findings if each.kind == "start"}
    missing = "the model has it in one process, but not under the plan: its constructor depends on the plan"
    lost = [name for name in reference["names"] if name not in found]
    findings += [Finding("start", 0, name, relative=float("inf"), details=[missing]) for name in lost]
    findings += [_samples(ranks, reference["samples"][str(step)], step) for step in range(1, steps + 1)]
    stages: dict[tuple[int, str], set[int]] = {}
    for each in findings:
        stages.setdefault((each.step, each.name), set()).add(each.stage)
    # one process counts the calls of a module through all stages, a stage its own
    findings = [each for each in findings if each.kind != "output" or len(stages[each.step, each.name]) == 1]
    order = list(KINDS)
    findings.sort(key=lambda each: (each.step, order.index(each.kind), each.place, each.rank))
    # not "greater than": a difference that is not a number must not pass
    first = next((each for each in findings if not each.relative <= tolerance), None)
    verdict, at = Verdict({}, [], "", ranks), None if first is None else (first.step, first.kind)
    for each in findings:
        if first is not None and (each.step, each.kind) == at:
            if not each.relative <= tolerance:
                verdict.differing.append(each)
            elif each.place < first.place:
                verdict.before = each.name
        elif not verdict.differing:
            verdict.agreements.setdefault(each.kind, Agreement()).add(each)
    return verdict


def _samples(ranks: Sequence[Mapping[str, Any]], expected: Sequence[str], step: int) -> Finding:
    """Whether the ranks' samples, one rank of each shard of the batch, are those of one process in any order."""
    shards = {rank["batch_shard"]: rank["samples"][str(step)] for rank in ranks}
    taken, wanted = Counter(key for keys in shards.values() for key in keys), Counter(expected)
    if taken == wanted:
        return Finding("data", step)
    message = (
        f"{(taken - wanted).total()} of the {taken.total()} samples under the plan are not among the "
        f"{wanted.total()} that one process takes"
    )
    return Finding("data", step, relative=float("inf"), details=[message])


def render(verdict: Verdict, config: Config, grid: RankGrid, steps: int, tolerance: float) -> str:
    """The whole report."""
    lines = [f"note: {note}" for note in _notes(verdict.ranks)]
    if world_size(config.parallel) == 1 and config.schedule.microbatches == 1:
        lines.append("note: the plan is one process with one microbatch, so this compares a run with itself")
    if verdict.differing:
        lines += _difference(verdict, config, grid, tolerance)
    else:
        number = f"{steps} step{'' if steps == 1 else 's'}"
        lines.append(f"AGREE: {describe_plan(config)} follows one process over {number}, tolerance {tolerance:g}")
    return "\n".join([*lines, "", *table(verdict)])


def _notes(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for rank in ranks for name in rank["dropout"]))
    norms = list(dict.fromkeys(name for rank in ranks for name in rank["batch_norms"]))
    notes = []
    if names:
        notes.append(f"dropout is off here, its masks differ between plans by design: {_listed(names)}")
    if norms:
        notes.append(
            f"BatchNorm takes its statistics over the samples that a rank holds at once, so {_listed(norms)} and all "
            f"that follows depend on the plan"
        )
    return notes


def _difference(verdict: Verdict, config: Config, grid: RankGrid, tolerance: float) -> list[str]:
    first = verdict.differing[0]
    same = [each for each in verdict.differing if each.name == first.name]
    when = f"at step {first.step}" if first.step else "from the start"
    lines = [f"DIFFERENT {when}: {_TITLES[first.kind].format(first.name)}"]
    if first.kind in ("start", "output", "gradient", "weight") and grid.world_size > 1:
        ranks = [f"{each.rank} ({grid.where(each.rank)})" for each in same]
        lines.append(f"  on rank{'' if len(ranks) == 1 else 's'} {_listed(ranks)}")
    if first.relative != float("inf") or first.absolute:
        at = f" at {list(first.index)}" if first.index else ""
        at = at if first.sample is None else f" in sample {first.sample}"
        norm = "norm " if first.kind == "output" else ""
        lines.append(
            f"  relative difference {first.relative:.3g} (tolerance {tolerance:g}), absolute {first.absolute:.3g}{at}: "
            f"plan {norm}{first.plan:.12g}, one process {norm}{first.reference:.12g}"
        )
    lines += [f"  {line}" for line in first.details]
    factors = {f"{each.factor:.6g}" for each in same if each.factor is not None}
    if len(factors) == 1 and first.factor is not None and all(each.factor is not None for each in same):
        lines.append(f"  it is {first.factor:.6g} times that of one process{_sizes(first, grid)}")
    if tolerance < first.relative < _FLOAT32:
        lines.append(
            "  the difference is of the size of float32 rounding: something may compute in float32 (.float(), a "
            "constant made with dtype=torch.float32)"
        )
    if first.kind == "output":
        lines.append(
            f"  the samples and the outputs before it agree, the last is that of {verdict.before}"
            if verdict.before
            else "  the samples agree, and it is the first output"
        )
        if grid.size("sequence") > 1:
            lines.append(
                "  a rank has a part of the tokens of each sequence: what looks at several of them (a mean, a shift, "
                "an index, positions from arange, an attention of one's own) is wrong on it"
            )
        if grid.size("pipeline") > 1:
            lines.append("  under a pipeline the blocks of the model are called in turn, not its forward")
    if first.kind == "weight":
        lines.append(f"  optimizer {name_of(config.optimizer.type)}")
    others = list(dict.fromkeys(each.name for each in verdict.differing if each.name != first.name))
    if others:
        lines.append(f"  then also: {_listed(others)}")
    return [*lines, f"  {KINDS[first.kind][1]}"]


def _sizes(finding: Finding, grid: RankGrid) -> str:
    """Which axes have as many ranks as the factor of a gradient, or one over it, says."""
    factor = finding.factor or 0.0
    if finding.kind != "gradient" or factor <= 0:
        return ""
    times = max(factor, 1 / factor)
    axes = [axis for axis, size in grid.sizes.items() if size > 1 and abs(times - size) < 1e-3]
    what = "a sum over it too many" if factor > 1 else "a sum over it is missing, or a mean taken in its place"
    return f" ({times:.0f} is the size of {' and of '.join(axes)}: {what}?)" if axes else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def table(verdict: Verdict) -> list[str]:
    """Kinds of things, how many of each, and the largest difference with its place."""
    if not verdict.agreements:
        return ["nothing agrees before it"]
    rows = [("agree", "number", "largest difference", "where")]
    for kind, agreement in verdict.agreements.items():
        largest = f"{agreement.largest:.2g}" if agreement.largest else "0"
        rows.append((KINDS[kind][0], str(len(agreement.names)), largest, agreement.where))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    left_out = max(rank["left_out"] for rank in verdict.ranks)
    if left_out:
        lines.append(
            f"not compared: weights whose gradient is rounding noise (as a key bias has it), up to {left_out:,} a rank"
        )
    return lines
