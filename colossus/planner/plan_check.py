"""A plan's prediction beside what its ranks do: steps of the real engine on tensors without values, in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from colossus.config import Config
from colossus.config.plans import world_size
from colossus.planner.check_report import CheckedRank, CheckReport, Compared
from colossus.planner.fake_step import RankStep, fake_steps, ranks_of_pipeline
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.rank_memory import PlanMemory, RankMemory


def check(config: Config, estimate: PlanEstimate, ranks: Sequence[int] | None = None) -> CheckReport:
    """Count what some ranks of a plan send in a step, and hold, and put it beside the prediction.

    Args:
        config: resolved.
        estimate: of this config.
        ranks: of the world; by default of the pipeline the first and the last rank, the fullest, and of those between
            the one that stores most: the others do no more.

    Raises:
        ConfigError: see `fake_steps`.
    """
    if ranks is None:
        ranks = ranks_of_pipeline(config, _chosen(estimate.memory))
    steps = fake_steps(config, ranks)
    counted = _bytes_by_axes(steps)
    predicted = {axes: cost.bytes for axes, cost in estimate.axes.items() if cost.bytes}
    rows = [Compared(axes, predicted.get(axes, 0.0), counted.get(axes, 0.0)) for axes in {**predicted, **counted}]
    checked = [_checked(step, estimate.memory.ranks[step.pipeline_rank]) for step in steps]
    return CheckReport(world_size(config.parallel), rows, checked)


def _chosen(memory: PlanMemory) -> list[int]:
    """Of the ranks of a pipeline."""
    between = memory.ranks[1:-1]
    found = {0, len(memory.ranks) - 1, memory.fullest.rank}
    if between:
        found.add(max(between, key=lambda rank: rank.stored.weights).rank)
    return sorted(found)


def _bytes_by_axes(steps: Sequence[RankStep]) -> dict[str, float]:
    """Of each axis those of the rank that sends most along it."""
    most: dict[str, float] = {}
    for step in steps:
        own: defaultdict[str, float] = defaultdict(float)
        for (_, axes), tally in step.moved.items():
            own[axes] += tally.bytes
        most |= {axes: max(most.get(axes, 0.0), sent) for axes, sent in own.items()}
    return most


def _checked(step: RankStep, memory: RankMemory) -> CheckedRank:
    stored, counted = memory.stored, step.stored
    operations = [{"operation": kind, "axes": axes, **vars(tally)} for (kind, axes), tally in step.moved.items()]
    return CheckedRank(
        step.rank,
        step.pipeline_rank,
        [
            Compared("weights", stored.weights, counted.weights),
            Compared("gradients", stored.gradients_between, counted.gradients),
            Compared("optimizer", stored.optimizer, counted.optimizer),
        ],
        Compared("peak", memory.total + stored.on_host, step.peak),  # here all is in the memory of the host
        operations,
        step.seconds,
    )
