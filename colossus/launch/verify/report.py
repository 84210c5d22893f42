"""The verdict in words."""

from __future__ import annotations

import math

from colossus.config import Config
from colossus.config.plans import arithmetic, world_size
from colossus.context.grid import RankGrid
from colossus.launch.verify import clues
from colossus.launch.verify.compare import Verdict, place_of
from colossus.launch.verify.records import ParameterFacts, Records
from colossus.launch.verify.stages import KINDS, Finding, Stage

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
    "weight": "the gradients agree: the optimizer must work element by element, since ranks hold parts of parameters",
    "copy": "ranks that hold the same thing must have the same bits in it: something acts on some of them only",
}


def plan_in_words(config: Config) -> str:
    """``data 2 x tensor 4 (2d), 2 microbatches``."""
    tensor, microbatches = config.parallel.tensor, config.schedule.microbatches
    mode = f" ({tensor.mode}{', sequence sharded' if tensor.sequence_sharded else ''})" if tensor.size > 1 else ""
    return f"{arithmetic(config.parallel)}{mode}{f', {microbatches} microbatches' if microbatches > 1 else ''}"


def render(
    verdict: Verdict, config: Config, plan: Records, alone: Records, grid: RankGrid, steps: int, tolerance: float
) -> str:
    """The whole report."""
    title = plan_in_words(config)
    # calls of torch.nn.functional are seen where they happen, so every rank may know more than the others
    notes = dict.fromkeys(note for rank in range(plan.world_size) for note in plan.facts(rank).notes)
    lines = [f"note: {note}" for note in notes]
    if world_size(config.parallel) == 1 and config.schedule.microbatches == 1:
        lines.append("note: the plan is one process with one microbatch, so this compares a run with itself")
    if verdict.stage is None:
        lines.append(f"AGREE: {title} follows one process over {_steps(steps)}, tolerance {tolerance:g}")
    else:
        lines += _difference(verdict, config, plan, alone, grid, tolerance)
    return "\n".join([*lines, "", *_table(verdict)])


def _difference(
    verdict: Verdict, config: Config, plan: Records, alone: Records, grid: RankGrid, tolerance: float
) -> list[str]:
    stage, finding = verdict.stage, verdict.differing[0]
    assert stage is not None
    when = f"at step {stage.step}" if stage.step else "from the start"
    lines = [f"DIFFERENT {when}: {_title(stage, finding)}"]
    details = [finding.words] if finding.words else _numbers(stage, finding, tolerance)
    parameters = plan.parameters()
    if finding.name in parameters:
        details += _parameter(parameters[finding.name], stage)
        details += _clues(stage, finding, plan, alone, parameters[finding.name], grid)
    if finding.rank is not None and grid.world_size > 1:
        details += _ranks(finding, grid, tolerance)
    if stage.kind == "output":
        details += _module(stage, finding, plan)
    details += clues.of_size(finding.gap) if not finding.words else []
    if stage.kind == "weight":
        kind = config.optimizer.type
        details.append(f"optimizer {kind if isinstance(kind, str) else getattr(kind, '__name__', type(kind).__name__)}")
    lines += [f"  {line}" for line in details if line]
    others = [place_of(Stage(stage.kind, 0), found) for found in verdict.differing[1:]]
    if others:
        more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
        lines.append(f"  then also: {'; '.join(others[:MOST_OTHERS])}{more}")
    return [*lines, f"  {ADVICE[stage.kind]}"]


def _title(stage: Stage, finding: Finding) -> str:
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
        "copy": f"the {finding.of} of {finding.name}{where} is not that on rank 0",
    }[stage.kind]


def _numbers(stage: Stage, finding: Finding, tolerance: float) -> list[str]:
    gap = finding.gap
    relative = f"relative difference {gap.relative:.3g} (tolerance {tolerance:g})"
    other = "rank 0" if stage.kind == "copy" else "one process"
    what = "norm " if stage.kind in ("output", "copy") else ""
    here = f"rank {finding.rank}" if stage.kind == "copy" else "plan"
    values = f"{here} {what}{gap.plan:.12g}, {other} {what}{gap.alone:.12g}"
    if stage.kind in ("start", "gradient", "weight"):
        at = f"at {list(gap.index)}" if gap.index else "of the scalar"
        return [relative, f"largest absolute difference {gap.absolute:.3g} {at}: {values}"]
    return [relative, f"absolute difference {gap.absolute:.3g}: {values}"]


def _parameter(facts: ParameterFacts, stage: Stage) -> list[str]:
    split = f"layout {facts.layout}" if facts.layout.shard_axes else "whole on every rank"
    lines = [f"shape {list(facts.shape)}, {split}, {_of(facts.origin)}"]
    if stage.kind == "gradient":
        axes = " x ".join(facts.gradient_axes)
        lines.append(f"its gradient is summed over {axes}" if axes else "its gradient needs no sum over ranks")
    return lines


def _of(origin: str) -> str:
    return "a plain parameter" if origin == "plain parameter" else f"made by {origin}"


def _clues(
    stage: Stage, finding: Finding, plan: Records, alone: Records, facts: ParameterFacts, grid: RankGrid
) -> list[str]:
    kind = {"start": "weights", "weight": "weights", "gradient": "gradients"}.get(stage.kind)
    if kind is None or finding.words or not math.isfinite(finding.gap.relative):
        return []
    mine, other = (records.whole(kind, stage.step).get(finding.name) for records in (plan, alone))
    if mine is None or other is None:
        missing = "under the plan" if mine is None else "in one process"
        return [f"it has no gradient at all {missing}"]
    return clues.of_values(mine, other, facts, grid, 1e-3 * finding.gap.absolute, is_sum=stage.kind == "gradient")


def _ranks(finding: Finding, grid: RankGrid, tolerance: float) -> list[str]:
    assert finding.rank is not None
    lines = [clues.who(finding.rank, grid)]
    wrong = [rank for rank, relative in enumerate(finding.by_rank) if not relative <= tolerance]
    if len(wrong) > 1:
        every = "all ranks" if len(wrong) == grid.world_size else f"ranks {', '.join(map(str, wrong))}"
        lines.append(f"it differs on {every}")
    return lines


def _module(stage: Stage, finding: Finding, plan: Records) -> list[str]:
    kind = plan.facts(0).modules.get(finding.name.partition(",")[0])
    before = stage.findings[: stage.findings.index(finding)]
    agrees = "the samples agree, and it is the first output"
    if before:
        last = before[-1].name.partition(", sample ")[0]
        agrees = f"the samples and the outputs before it agree, the last is that of {last}"
    return [f"class {kind}" if kind else "", agrees]


def _table(verdict: Verdict) -> list[str]:
    if not verdict.tallies:
        return ["nothing agrees before it"]
    rows = [("agree", "number", "largest difference", "where")]
    for kind, tally in verdict.tallies.items():
        largest = f"{tally.largest:.2g}" if tally.largest else "0"
        rows.append((KINDS[kind], str(tally.count), largest, tally.where))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    if verdict.left_out:
        lines.append(
            f"not compared: {verdict.left_out:,} weights whose gradient is rounding noise (as a key bias has it)"
        )
    return lines


def _steps(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"
