"""The check of a plan: its prediction beside steps of the real engine on tensors without values, in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from colossus.config import Config
from colossus.config.plans import world_size
from colossus.planner.check_report import CheckedRank, CheckReport, Compared
from colossus.planner.fake_step import RankStep, fake_steps, ranks_of_pipeline
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.rank_memory import PlanMemory, RankMemory


def check(
    config: Config, estimate: PlanEstimate, ranks: Sequence[int] | None = None, *, on_cpu: bool = False
) -> CheckReport:
    """Compare the bytes that some ranks of a plan send and hold in a step with the prediction.

    Args:
        config: the resolved config of the plan.
        estimate: the prediction for it.
        ranks: ranks in the world; by default one for each of these pipeline ranks: the first, the last, the fullest,
            and of those between the one that stores most. The others do no more.
        on_cpu: whether the plan is for ranks on CPUs.

    Raises:
        ConfigError: see `fake_steps`.
    """
    if ranks is None:
        ranks = ranks_of_pipeline(config, _pipeline_ranks(estimate.memory))
    steps = fake_steps(config, ranks, on_cpu=on_cpu)
    counted = _bytes_by_axes(steps)
    predicted = {axes: cost.bytes for axes, cost in estimate.axes.items() if cost.bytes}
    rows = [Compared(axes, predicted.get(axes, 0.0), counted.get(axes, 0.0)) for axes in {**predicted, **counted}]
    checked = [_checked(step, estimate.memory.ranks[step.pipeline_rank]) for step in steps]
    return CheckReport(world_size(config.parallel), rows, checked)


def _pipeline_ranks(memory: PlanMemory) -> list[int]:
    """Return the pipeline ranks that are checked by default."""
    between = memory.ranks[1:-1]
    ranks = {0, len(memory.ranks) - 1, memory.fullest.rank}
    if between:
        ranks.add(max(between, key=lambda rank: rank.stored.weights).rank)
    return sorted(ranks)


def _bytes_by_axes(steps: Sequence[RankStep]) -> dict[str, float]:
    """Return the bytes along each axis, of the rank that sends most along it."""
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
        Compared("peak", memory.total + stored.on_host, step.peak),  # the check has all tensors on the CPU
        operations,
        step.seconds,
    )
