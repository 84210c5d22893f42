"""The verdict as text: that the runs agree, or where they differ first, and a table of what agrees."""

from __future__ import annotations

import math
from collections.abc import Mapping

from colossus.config import Config
from colossus.config.plans import describe_plan, name_of
from colossus.config.sizes import world_size
from colossus.context.grid import RankGrid
from colossus.verify import diagnosis
from colossus.verify.checks import KINDS, Check, Verdict, place_of
from colossus.verify.diagnosis import describe_rank, describe_stage, describe_stages, first_names
from colossus.verify.findings import Finding
from colossus.verify.records import ParameterInfo, Records

MOST_OTHERS = 4

#: kind of the first difference -> what to look for
ADVICE = {
    "start": "initial values depend on the seed, the parameter's name and its full shape; this one depends on the plan",
    "data": "nothing of the model was compared: the data itself depends on the number of processes, or on chance",
    "output": "so it is the forward of this module, or what its caller does before it, that depends on the plan",
    "count": "the loss function returns (sum, count): count is the number of valid samples of what it was given",
    "loss": "the outputs agree: the loss is a sum over the samples it was given, so no mean and no term per call",
    "gradient": "the outputs and the loss agree, so it is the backward, where this is the first that differs",
    "norm": "the gradients agree, but their norm does not: an element is counted twice or not at all",
    "weight": "the gradients agree: the optimizer must work element by element, since ranks hold shards of parameters",
    "copy": "ranks that hold the same thing must have the same bits in it: something acts on some of them only",
}


def render(
    verdict: Verdict, config: Config, plan: Records, reference: Records, grid: RankGrid, steps: int, tolerance: float
) -> str:
    """The whole report."""
    title = describe_plan(config)
    lines = [f"note: {note}" for note in _notes(plan)]
    if world_size(config.parallel) == 1 and config.schedule.microbatches == 1:
        lines.append("note: the plan is one process with one microbatch, so this compares a run with itself")
    if verdict.check is None:
        lines.append(f"AGREE: {title} follows one process over {_steps(steps)}, tolerance {tolerance:g}")
    else:
        lines += _difference(verdict, config, plan, reference, grid, tolerance)
    return "\n".join([*lines, "", *table(verdict)])


def _notes(plan: Records) -> list[str]:
    # calls of torch.nn.functional are seen where they happen, so every rank may know more than the others
    ranks = [plan.rank_info(rank) for rank in range(plan.world_size)]
    names = list(dict.fromkeys(name for info in ranks for name in info.without_dropout))
    norms = list(dict.fromkeys(name for info in ranks for name in info.batch_norms))
    notes = []
    if names:
        notes.append(f"dropout is off here, its masks differ between plans by design: {first_names(names)}")
    if norms:
        notes.append(
            f"BatchNorm takes its statistics over the samples that a rank holds at once, so {first_names(norms)} and "
            f"all that follows depend on the plan"
        )
    return notes


def _difference(
    verdict: Verdict, config: Config, plan: Records, reference: Records, grid: RankGrid, tolerance: float
) -> list[str]:
    check, finding = verdict.check, verdict.differing[0]
    assert check is not None
    when = f"at step {check.step}" if check.step else "from the start"
    lines = [f"DIFFERENT {when}: {_title(check, finding)}"]
    details = [finding.message] if finding.message else _numbers(check, finding, tolerance)
    parameters = plan.parameters()
    rank_of = plan.rank_info(0).rank_of
    if finding.name in parameters:
        details += _parameter(parameters[finding.name], check)
        details += describe_stages(parameters[finding.name].stages, rank_of, grid)
        details += _diagnosis(check, finding, plan, reference, parameters[finding.name], grid)
    if finding.rank is not None and grid.world_size > 1:
        details += _ranks(check, finding, rank_of, grid, tolerance)
    if check.kind == "output":
        details += _module(check, finding, plan)
        if grid.size("sequence") > 1:
            details.append(
                "a rank has a part of the tokens of each sequence: what looks at several of them (a mean, a shift, an "
                "index, positions from arange, an attention of one's own) is wrong on it"
            )
    if check.kind in ("count", "loss"):
        details += describe_stages([max(rank_of)], rank_of, grid)
    details += diagnosis.of_size(finding.difference) if not finding.message else []
    if check.kind == "weight":
        details.append(f"optimizer {name_of(config.optimizer.type)}")
    lines += [f"  {line}" for line in details if line]
    others = [place_of(Check(check.kind, 0), found) for found in verdict.differing[1:]]
    if others:
        more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
        lines.append(f"  then also: {'; '.join(others[:MOST_OTHERS])}{more}")
    return [*lines, f"  {ADVICE[check.kind]}"]


def _title(check: Check, finding: Finding) -> str:
    where = f" on rank {finding.rank}" if finding.rank is not None else ""
    return {
        "start": f"the initial value of {finding.name}",
        "data": f"the samples{where}",
        "output": f"the output of {finding.name}{where}",
        "count": "the number of valid samples of the global batch",
        "loss": "the loss",
        "gradient": f"the gradient of {finding.name}",
        "norm": "the gradient norm",
        "weight": f"{finding.name} after the optimizer",
        "copy": f"the {finding.copy_of} of {finding.name}{where} is not that on rank {finding.other_rank}",
    }[check.kind]


def _numbers(check: Check, finding: Finding, tolerance: float) -> list[str]:
    difference = finding.difference
    relative = f"relative difference {difference.relative:.3g} (tolerance {tolerance:g})"
    other = f"rank {finding.other_rank}" if check.kind == "copy" else "one process"
    what = "norm " if check.kind in ("output", "copy") else ""
    here = f"rank {finding.rank}" if check.kind == "copy" else "plan"
    values = f"{here} {what}{difference.plan:.12g}, {other} {what}{difference.reference:.12g}"
    if check.kind in ("start", "gradient", "weight"):
        at = f"at {list(difference.index)}" if difference.index else "of the scalar"
        return [relative, f"largest absolute difference {difference.absolute:.3g} {at}: {values}"]
    return [relative, f"absolute difference {difference.absolute:.3g}: {values}"]


def _parameter(info: ParameterInfo, check: Check) -> list[str]:
    split = f"layout {info.layout}" if info.layout.shard_axes else "whole on every rank"
    lines = [f"shape {list(info.shape)}, {split}, {_of(info.origin)}"]
    if check.kind == "gradient":
        axes = " x ".join(info.gradient_axes)
        lines.append(f"its gradient is summed over {axes}" if axes else "its gradient needs no sum over ranks")
    return lines


def _of(origin: str) -> str:
    return "a plain parameter" if origin == "plain parameter" else f"made by {origin}"


def _diagnosis(
    check: Check, finding: Finding, plan: Records, reference: Records, info: ParameterInfo, grid: RankGrid
) -> list[str]:
    kind = {"start": "weights", "weight": "weights", "gradient": "gradients"}.get(check.kind)
    if kind is None or finding.message or not math.isfinite(finding.difference.relative):
        return []
    mine, other = (records.full(kind, check.step).get(finding.name) for records in (plan, reference))
    if mine is None or other is None:
        missing = "under the plan" if mine is None else "in one process"
        return [f"it has no gradient at all {missing}"]
    return diagnosis.of_values(
        mine, other, info, grid, 1e-3 * finding.difference.absolute, is_sum=check.kind == "gradient"
    )


def _ranks(check: Check, finding: Finding, rank_of: Mapping[int, int], grid: RankGrid, tolerance: float) -> list[str]:
    assert finding.rank is not None
    is_staged = check.kind == "output" and len(rank_of) > 1
    lines = [describe_rank(finding.rank, grid) + (f", {describe_stage(finding.stage, rank_of)}" if is_staged else "")]
    wrong = [rank for rank, relative in finding.by_rank.items() if not relative <= tolerance]
    if len(wrong) > 1:
        every = "all ranks" if len(wrong) == grid.world_size else f"ranks {', '.join(map(str, wrong))}"
        lines.append(f"it differs on {every}")
    return lines


def _module(check: Check, finding: Finding, plan: Records) -> list[str]:
    info = plan.rank_info(0)
    kind = info.modules.get(finding.name.partition(",")[0])
    before = check.findings[: check.findings.index(finding)]
    agrees = "the samples agree, and it is the first output"
    if before:
        last = before[-1].name.partition(", sample ")[0]
        agrees = f"the samples and the outputs before it agree, the last is that of {last}"
    chain = "under a pipeline the blocks of the model are called in turn, not its forward"
    return [f"class {kind}" if kind else "", agrees, chain if len(info.rank_of) > 1 else ""]


def _steps(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"


def table(verdict: Verdict) -> list[str]:
    """Kinds of things, how many of each, and the largest difference with its place."""
    if not verdict.agreements:
        return ["nothing agrees before it"]
    rows = [("agree", "number", "largest difference", "where")]
    for kind, agreement in verdict.agreements.items():
        largest = f"{agreement.largest:.2g}" if agreement.largest else "0"
        rows.append((KINDS[kind], str(agreement.count), largest, agreement.where))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    if verdict.num_left_out:
        lines.append(
            f"not compared: {verdict.num_left_out:,} weights whose gradient is rounding noise (as a key bias has it)"
        )
    return lines
