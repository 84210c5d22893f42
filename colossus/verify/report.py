"""The verdict in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from colossus.config import Config
from colossus.config.plans import arithmetic, world_size
from colossus.context.grid import RankGrid
from colossus.verify import diagnosis
from colossus.verify.compare import Verdict, place_of
from colossus.verify.describe import on_stages, place_in, some, who
from colossus.verify.finding import Finding, Stage
from colossus.verify.records import ParameterFacts, Records
from colossus.verify.table import table

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
    """``data 2 x pipeline 2 x tensor 4 (2d), 1f1b, 2 microbatches``."""
    tensor, microbatches = config.parallel.tensor, config.schedule.microbatches
    mode = f" ({tensor.mode}{', sequence sharded' if tensor.sequence_sharded else ''})" if tensor.size > 1 else ""
    schedule = f", {_named(config.schedule.type)}" if config.parallel.pipeline.size > 1 else ""
    return (
        f"{arithmetic(config.parallel)}{mode}{schedule}{f', {microbatches} microbatches' if microbatches > 1 else ''}"
    )


def render(
    verdict: Verdict, config: Config, plan: Records, alone: Records, grid: RankGrid, steps: int, tolerance: float
) -> str:
    """The whole report."""
    title = plan_in_words(config)
    lines = [f"note: {note}" for note in _notes(plan)]
    if world_size(config.parallel) == 1 and config.schedule.microbatches == 1:
        lines.append("note: the plan is one process with one microbatch, so this compares a run with itself")
    if verdict.stage is None:
        lines.append(f"AGREE: {title} follows one process over {_steps(steps)}, tolerance {tolerance:g}")
    else:
        lines += _difference(verdict, config, plan, alone, grid, tolerance)
    return "\n".join([*lines, "", *table(verdict)])


def _notes(plan: Records) -> list[str]:
    # calls of torch.nn.functional are seen where they happen, so every rank may know more than the others
    ranks = [plan.facts(rank) for rank in range(plan.world_size)]
    silent = list(dict.fromkeys(name for facts in ranks for name in facts.silenced))
    norms = list(dict.fromkeys(name for facts in ranks for name in facts.batch_norms))
    notes = []
    if silent:
        notes.append(f"dropout is off here, its masks differ between plans by design: {some(silent)}")
    if norms:
        notes.append(
            f"BatchNorm takes its statistics over the samples that a rank holds at once, so {some(norms)} and all "
            f"that follows depend on the plan"
        )
    return notes


def _difference(
    verdict: Verdict, config: Config, plan: Records, alone: Records, grid: RankGrid, tolerance: float
) -> list[str]:
    stage, finding = verdict.stage, verdict.differing[0]
    assert stage is not None
    when = f"at step {stage.step}" if stage.step else "from the start"
    lines = [f"DIFFERENT {when}: {_title(stage, finding)}"]
    details = [finding.words] if finding.words else _numbers(stage, finding, tolerance)
    parameters = plan.parameters()
    rank_of = plan.facts(0).rank_of
    if finding.name in parameters:
        details += _parameter(parameters[finding.name], stage)
        details += on_stages(parameters[finding.name].stages, rank_of, grid)
        details += _clues(stage, finding, plan, alone, parameters[finding.name], grid)
    if finding.rank is not None and grid.world_size > 1:
        details += _ranks(stage, finding, rank_of, grid, tolerance)
    if stage.kind == "output":
        details += _module(stage, finding, plan)
    if stage.kind in ("count", "loss"):
        details += on_stages([max(rank_of)], rank_of, grid)
    details += diagnosis.of_size(finding.gap) if not finding.words else []
    if stage.kind == "weight":
        details.append(f"optimizer {_named(config.optimizer.type)}")
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
        "copy": f"the {finding.of} of {finding.name}{where} is not that on rank {finding.other}",
    }[stage.kind]


def _numbers(stage: Stage, finding: Finding, tolerance: float) -> list[str]:
    gap = finding.gap
    relative = f"relative difference {gap.relative:.3g} (tolerance {tolerance:g})"
    other = f"rank {finding.other}" if stage.kind == "copy" else "one process"
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
    return diagnosis.of_values(mine, other, facts, grid, 1e-3 * finding.gap.absolute, is_sum=stage.kind == "gradient")


def _ranks(stage: Stage, finding: Finding, rank_of: Mapping[int, int], grid: RankGrid, tolerance: float) -> list[str]:
    assert finding.rank is not None
    is_staged = stage.kind == "output" and len(rank_of) > 1
    lines = [who(finding.rank, grid) + (f", {place_in(finding.pipeline_stage, rank_of)}" if is_staged else "")]
    wrong = [rank for rank, relative in finding.by_rank.items() if not relative <= tolerance]
    if len(wrong) > 1:
        every = "all ranks" if len(wrong) == grid.world_size else f"ranks {', '.join(map(str, wrong))}"
        lines.append(f"it differs on {every}")
    return lines


def _module(stage: Stage, finding: Finding, plan: Records) -> list[str]:
    facts = plan.facts(0)
    kind = facts.modules.get(finding.name.partition(",")[0])
    before = stage.findings[: stage.findings.index(finding)]
    agrees = "the samples agree, and it is the first output"
    if before:
        last = before[-1].name.partition(", sample ")[0]
        agrees = f"the samples and the outputs before it agree, the last is that of {last}"
    chain = "under a pipeline the blocks of the model are called in turn, not its forward"
    return [f"class {kind}" if kind else "", agrees, chain if len(facts.rank_of) > 1 else ""]


def _named(kind: Any) -> str:
    """A registered name, or that of a class or function."""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)


def _steps(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"
