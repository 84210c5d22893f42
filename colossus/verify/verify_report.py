"""The report of a comparison: the findings of all ranks in the order of cause and effect, as text. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from colossus.arithmetic import listed
from colossus.config import Config
from colossus.config.plans import describe_plan
from colossus.context.grid import RankGrid


class Kind(NamedTuple):
    """A kind of compared values: its name in the table, in a title, and a hint for the kind that differs first."""

    plural: str
    title: str
    hint: str


#: in the order of a step: a difference of one kind causes those of later kinds
KINDS = {
    "start": Kind(
        "initial values",
        "the initial value of {}",
        "initial values depend on the seed, the parameter's name and its full shape; this one depends on the plan",
    ),
    "data": Kind(
        "samples",
        "the samples",
        "the model was not compared: the data itself depends on the number of processes, or on chance",
    ),
    "output": Kind(
        "outputs of modules",
        "the output of {}",
        "so the forward of this module, or its caller's code before it, depends on the plan",
    ),
    "count": Kind(
        "numbers of valid samples",
        "the number of valid samples of the global batch",
        "the loss function returns (sum, count): count is the number of valid samples among its arguments",
    ),
    "loss": Kind(
        "losses",
        "the loss",
        "the outputs agree: the loss must be a sum over the samples of the call, so no mean and no term per call",
    ),
    "gradient": Kind(
        "gradients",
        "the gradient of {}",
        "the outputs and the loss agree, so the backward is wrong, and this gradient is the first that differs",
    ),
    "norm": Kind(
        "gradient norms",
        "the gradient norm",
        "the gradients agree, but their norm does not: an element is counted twice or not at all",
    ),
    "weight": Kind(
        "weights after a step",
        "{} after the optimizer",
        "the gradients agree: the optimizer must work element by element, since ranks hold shards of parameters",
    ),
}


@dataclass(frozen=True)
class Finding:
    """The comparison of one value on one rank.

    Attributes:
        kind: a key of `KINDS`.
        step: the step; 0 before the first.
        place: the place in the order of its kind: that of the forward, for gradients that of the backward.
        relative: norm of the difference over the scale; infinite where the two cannot be compared.
        absolute: the largest difference of an element. ``index`` is its place, ``plan`` and ``reference`` the values
            there; for an output, the norms of the sample.
        stage: the pipeline stage that computed an output.
        details: lines that describe the value.
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
    stage: int = 0
    details: Sequence[str] = ()


@dataclass
class Agreement:
    """The number of compared values of one kind, and their largest relative difference with its place."""

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
    """The result of the comparison.

    Attributes:
        agreements: kind -> the values that agree, before the first that differs.
        differing: the findings beyond the tolerance of the first kind, in the first step, that has any; in order.
        before: name of the value that was compared just before the first of them.
        num_left_out: elements of weights that were not compared, on the rank that has most of them.
        num_shards: parts into which ranks split the samples of a batch.
    """

    agreements: dict[str, Agreement]
    differing: list[Finding]
    before: str
    num_left_out: int
    num_shards: int = 1


def read(folder: Path, num_ranks: int, steps: int, tolerance: float) -> Verdict:
    """Read the files of the hooks of both runs, and return the verdict."""
    reference = json.loads((folder / "reference.json").read_text())
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    findings = [Finding(**entry) for rank in ranks for entry in rank["findings"]]
    names = {finding.name for finding in findings if finding.kind == "start"}
    missing = "the model has it in one process, but not under the plan: its constructor depends on the plan"
    lost = [name for name in reference["names"] if name not in names]
    findings += [Finding("start", 0, name, relative=float("inf"), details=[missing]) for name in lost]
    findings += [_samples(ranks, reference["samples"][str(step)], step) for step in range(1, steps + 1)]
    stages: dict[tuple[int, str], set[int]] = {}
    for item in findings:
        stages.setdefault((item.step, item.name), set()).add(item.stage)
    # one process numbers the calls of a module over all stages, but each stage numbers its own
    findings = [item for item in findings if item.kind != "output" or len(stages[item.step, item.name]) == 1]
    order = list(KINDS)
    findings.sort(key=lambda item: (item.step, order.index(item.kind), item.place, item.rank))
    # not "greater than": a difference that is not a number must not pass
    first = next((item for item in findings if not item.relative <= tolerance), None)
    num_shards = len({rank["batch_shard"] for rank in ranks})
    verdict = Verdict({}, [], "", max(rank["left_out"] for rank in ranks), num_shards)
    for item in findings:
        if first is None or (item.step, item.kind) != (first.step, first.kind):
            if verdict.differing:
                break
            verdict.agreements.setdefault(item.kind, Agreement()).add(item)
        elif not item.relative <= tolerance:
            verdict.differing.append(item)
        elif item.place < first.place:
            verdict.before = item.name
    return verdict


def _samples(ranks: Sequence[Mapping[str, Any]], expected: Sequence[str], step: int) -> Finding:
    """Compare the ranks' samples, of one rank of each shard of the batch, with those of one process, in any order."""
    shards = {rank["batch_shard"]: rank["samples"][str(step)] for rank in ranks}
    taken, wanted = Counter(key for keys in shards.values() for key in keys), Counter(expected)
    if taken == wanted:
        return Finding("data", step)
    message = (
        f"{(taken - wanted).total()} of {taken.total()} samples under the plan are not in the batch of one process"
    )
    return Finding("data", step, relative=float("inf"), details=[message])


def render(verdict: Verdict, config: Config, grid: RankGrid, steps: int, tolerance: float) -> str:
    """Return the whole report."""
    if verdict.differing:
        lines = _difference(verdict, config, grid, tolerance)
    else:
        number = f"{steps} step{'' if steps == 1 else 's'}"
        lines = [f"AGREE: {describe_plan(config)} follows one process over {number}, tolerance {tolerance:g}"]
    return "\n".join([*lines, "", *table(verdict)])


def _difference(verdict: Verdict, config: Config, grid: RankGrid, tolerance: float) -> list[str]:
    first = verdict.differing[0]
    same = [finding for finding in verdict.differing if finding.name == first.name]
    when = f"at step {first.step}" if first.step else "from the start"
    lines = [f"DIFFERENT {when}: {KINDS[first.kind].title.format(first.name)}"]
    if first.kind in ("start", "output", "gradient", "weight") and grid.world_size > 1:
        ranks = [f"{finding.rank} ({grid.where(finding.rank)})" for finding in same]
        lines.append(f"  on rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}")
    if first.relative != float("inf") or first.absolute:
        at = f" at {list(first.index)}" if first.index else ""
        at = at if first.sample is None else f" in sample {first.sample}"
        norm = "norm " if first.kind == "output" else ""
        lines.append(
            f"  relative difference {first.relative:.3g} (tolerance {tolerance:g}), absolute {first.absolute:.3g}{at}: "
            f"plan {norm}{first.plan:.12g}, one process {norm}{first.reference:.12g}"
        )
    lines += [f"  {line}" for line in first.details]
    if first.kind == "output":
        if verdict.before:
            lines.append(f"  the samples and the outputs before it agree, the last is that of {verdict.before}")
        if grid.size("sequence") > 1:
            lines.append(
                "  a rank has a part of the tokens of each sequence: code that combines several tokens (a mean, a "
                "shift, an index, positions from arange, an attention of one's own) is wrong on it"
            )
    splits_samples = verdict.num_shards > 1 or config.schedule.microbatches > 1
    if splits_samples and first.kind in ("output", "loss", "gradient", "weight"):
        lines.append(
            "  the samples of a batch are split over ranks or microbatches: code that combines several samples (a loss "
            "of pairs, a mean over the batch, a buffer that follows them) differs, unless it uses "
            "colossus.layers.gather_samples or mean_over_samples, with train.samples_interact=True"
        )
    others = list(dict.fromkeys(finding.name for finding in verdict.differing if finding.name != first.name))
    if others:
        lines.append(f"  then also: {listed(others)}")
    return [*lines, f"  {KINDS[first.kind].hint}"]


def table(verdict: Verdict) -> list[str]:
    """Return a line for each kind: how many values agree, and the largest difference with its place."""
    if not verdict.agreements:
        return ["nothing was compared before it"]
    lines = [f"{'agree':<24}  {'number':>6}  largest difference  where"]
    for kind, agreement in verdict.agreements.items():
        row = f"{KINDS[kind].plural:<24}  {len(agreement.names):>6}  {agreement.largest:>18.2g}  {agreement.where}"
        lines.append(row.rstrip())
    if verdict.num_left_out:
        lines.append(
            f"not compared: weights whose gradient is rounding noise (such as key biases), up to "
            f"{verdict.num_left_out:,} a rank"
        )
    return lines
