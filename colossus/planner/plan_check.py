"""The check of a plan: its prediction beside steps of the real engine on tensors without values, in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from colossus.config import Config
from colossus.config.plans import world_size
from colossus.context.grid import build_grid
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.planner.check_report import CheckedRank, CheckReport, Compared
from colossus.planner.device_play import DevicePlayer
from colossus.planner.device_record import Call
from colossus.planner.fake_step import RankStep, fake_steps, ranks_of_pipeline
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.rank_memory import PlanMemory, RankMemory

#: lines of the longest waits that are listed
_SITES = 5


def check(
    config: Config,
    estimate: PlanEstimate,
    ranks: Sequence[int] | None = None,
    *,
    hardware: Hardware | None = None,
    hosts: int = 1,
) -> CheckReport:
    """Compare a step of some ranks of a plan with the prediction: bytes that they send and hold, seconds.

    Args:
        config: the resolved config of the plan.
        estimate: the prediction for it.
        ranks: ranks in the world; by default one for each of these pipeline ranks: the first, the last, the fullest,
            and of those between the one that stores most. The others do no more.
        hardware: the devices of the prediction; seconds are played on devices that compute and communicate at once.
        hosts: number of their hosts.

    Raises:
        ConfigError: see `fake_steps`.
    """
    if ranks is None:
        ranks = ranks_of_pipeline(config, _pipeline_ranks(estimate.memory))
    has_streams = hardware is not None and hardware.overlaps
    steps = fake_steps(config, ranks, on_cpu=hardware is not None and not has_streams)
    counted = _bytes_by_axes(steps)
    predicted = {axes: cost.bytes for axes, cost in estimate.axes.items() if cost.bytes}
    rows = [Compared(axes, predicted.get(axes, 0.0), counted.get(axes, 0.0)) for axes in {**predicted, **counted}]
    checked = [_checked(step, estimate.memory.ranks[step.pipeline_rank]) for step in steps]
    seconds = _seconds(config, estimate, steps, hardware, hosts) if hardware is not None and has_streams else ()
    return CheckReport(world_size(config.parallel), rows, checked, seconds)


def _seconds(
    config: Config, estimate: PlanEstimate, steps: Sequence[RankStep], hardware: Hardware, hosts: int
) -> list[tuple[str, float | None, float]]:
    """Return rows of `CheckReport.seconds`, of the played rank that waits most.

    The axis of messages is left out, since a rank waits for them in the bubble. So is the step if not all pipeline
    ranks are played.
    """
    player = DevicePlayer(hardware, Placement(build_grid(config.parallel), hosts))
    played = player.play({step.rank: step.events for step in steps}).values()
    rows: list[tuple[str, float | None, float]] = []
    if len(steps) == len(estimate.memory.ranks):
        rows.append(("step", estimate.seconds, max(step.seconds for step in played)))
    messages = {call.axes for step in steps for call in step.events if isinstance(call, Call) and call.is_message}
    axes_cost = {axes: cost.exposed for axes, cost in estimate.axes.items()}
    for axes in dict.fromkeys((*axes_cost, *(axes for step in played for axes in step.exposed))):
        if axes not in messages:
            most = max(step.exposed.get(axes, 0.0) for step in played)
            rows.append((f"exposed over {axes}", axes_cost.get(axes, 0.0), most))
    sites: dict[tuple[str, str, str], float] = {}
    for step in played:
        for site, exposed in step.sites.items():
            if site[1] not in messages:
                sites[site] = max(exposed, sites.get(site, 0.0))
    longest = sorted(sites.items(), key=lambda item: -item[1])[:_SITES]
    return rows + [(f"  {operation} over {axes} at {line}", None, s) for (operation, axes, line), s in longest]


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
