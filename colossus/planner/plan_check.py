"""The check of a plan: its prediction beside steps of the real engine on tensors without values, in this process."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colossus.arithmetic import aligned, byte_count, named_ranks
from colossus.config.plans import world_size
from colossus.context.grid import build_grid
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.planner.device_play import Call, DevicePlayer
from colossus.planner.fake_step import RankStep, fake_steps
from colossus.planner.plan_estimate import PlanEstimate, PlanMemory, RankMemory


@dataclass(frozen=True)
class Compared:
    """Predicted and counted bytes of ``what``: an axis, or a kind of memory."""

    what: str
    predicted: float
    counted: float

    @property
    def is_equal(self) -> bool:
        """Return whether the two agree to the byte."""
        # Shares of a ring are not whole numbers, and are added in another order.
        return math.isclose(self.predicted, self.counted, rel_tol=1e-9, abs_tol=1e-6)

    @property
    def verdict(self) -> str:
        """Return the comparison in words."""
        return "equal" if self.is_equal else f"counted {self.counted - self.predicted:+,.0f} B"


@dataclass(frozen=True)
class CheckedRank:
    """The check of one rank.

    Attributes:
        step: the counts of its step.
        stored: bytes of weights, gradients and optimizer state between steps.
        peak: the most bytes in a step.
    """

    step: RankStep
    stored: Sequence[Compared]
    peak: Compared

    @classmethod
    def of(cls, step: RankStep, memory: RankMemory) -> CheckedRank:
        kinds = ("weights", "gradients", "optimizer")
        stored = [Compared(kind, getattr(memory.stored, kind), getattr(step.stored, kind)) for kind in kinds]
        # the check has all tensors on the CPU
        return cls(step, stored, Compared("peak", memory.total + memory.stored.on_host, step.peak))

    @property
    def ratio(self) -> float:
        """Return the predicted peak over the counted one."""
        return self.peak.predicted / self.peak.counted

    def as_json(self) -> dict[str, Any]:
        step = self.step
        operations = [{"operation": kind, "axes": axes, **vars(tally)} for (kind, axes), tally in step.moved.items()]
        return {
            "rank": step.rank,
            "pipeline_rank": step.pipeline_rank,
            "stored": _rows(self.stored),
            "peak": {**asdict(self.peak), "ratio": self.ratio},
            "operations": operations,
            "seconds": step.seconds,
        }


@dataclass(frozen=True)
class CheckReport:
    """The check of a plan.

    Attributes:
        world_size: ranks of the plan.
        axes: bytes along each axis in a step, of the rank that sends most.
        ranks: the ranks whose step was counted.
        seconds: predicted and played seconds (see `colossus.planner.device_play`) of the step, and those in which
            collectives along each axis are exposed; then the lines that wait longest, which nothing predicts.
    """

    world_size: int
    axes: Sequence[Compared]
    ranks: Sequence[CheckedRank]
    seconds: Sequence[tuple[str, float | None, float]] = ()

    @property
    def is_equal(self) -> bool:
        """Return whether bytes along axes and stored bytes agree. Peaks are shown, but need not agree."""
        stored = (row for rank in self.ranks for row in rank.stored)
        return all(row.is_equal for row in (*self.axes, *stored))

    def render(self) -> str:
        """Return the report as tables."""
        steps = [rank.step for rank in self.ranks]
        ranks, seconds = named_ranks([step.rank for step in steps]), sum(step.seconds for step in steps)
        head = f"checked     a step of {ranks} of {self.world_size:,} on tensors without values, in {seconds:.0f} s"
        axes = [("axis", "predicted", "counted", ""), *map(_cells, self.axes)]
        memory = [("pipeline rank", "bytes", "predicted", "counted", "")]
        for rank in self.ranks:
            place = str(rank.step.pipeline_rank)
            memory += [(place, *_cells(row)) for row in rank.stored]
            memory.append((place, *_cells(rank.peak)[:-1], f"predicted / counted {rank.ratio:.3f}"))
        sections = [head, aligned(axes, left_columns=(0, 3)), aligned(memory, left_columns=(1, 4))]
        sections = sections if self.axes else [head, sections[-1]]
        if self.seconds:
            rows = [
                (name, "" if predicted is None else _milliseconds(predicted), _milliseconds(played))
                for name, predicted, played in self.seconds
            ]
            sections.append(aligned([("seconds", "predicted", "played"), *rows], left_columns=(0,)))
        return "\n\n".join(sections)

    def as_json(self) -> dict[str, Any]:
        """Return the report, in bytes and seconds, as an object for JSON."""
        seconds = [{"what": name, "predicted": predicted, "played": played} for name, predicted, played in self.seconds]
        ranks = [rank.as_json() for rank in self.ranks]
        report = {"equal": self.is_equal, "world_size": self.world_size, "axes": _rows(self.axes), "ranks": ranks}
        return {**report, "seconds": seconds}


def _cells(row: Compared) -> tuple[str, str, str, str]:
    return row.what, byte_count(row.predicted), byte_count(row.counted), row.verdict


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _rows(rows: Iterable[Compared]) -> list[dict[str, Any]]:
    return [{**asdict(row), "equal": row.is_equal} for row in rows]


#: lines of the longest waits that are listed
_SITES = 5


def check(estimate: PlanEstimate, *, hardware: Hardware | None = None, hosts: int = 1) -> CheckReport:
    """Compare a step of some ranks of a plan with the prediction: bytes that they send and hold, seconds.

    The ranks are one for each of these pipeline ranks: the first, the last, the fullest, and of those between the one
    that stores most. The others do no more.

    Args:
        estimate: the prediction.
        hardware: the devices of the prediction; seconds are played on devices that compute and communicate at once.
        hosts: number of their hosts.

    Raises:
        ConfigError: see `fake_steps`.
    """
    has_streams = hardware is not None and hardware.overlaps
    config, places = estimate.config, _pipeline_ranks(estimate.memory)
    steps = fake_steps(config, places, on_cpu=hardware is not None and not has_streams)
    counted = _bytes_by_axes(steps)
    predicted = {axes: cost.bytes for axes, cost in estimate.axes.items() if cost.bytes}
    rows = [Compared(axes, predicted.get(axes, 0.0), counted.get(axes, 0.0)) for axes in {**predicted, **counted}]
    checked = [CheckedRank.of(step, estimate.memory.ranks[step.pipeline_rank]) for step in steps]
    seconds = _seconds(estimate, steps, hardware, hosts) if hardware is not None and has_streams else ()
    return CheckReport(world_size(config.parallel), rows, checked, seconds)


def _seconds(
    estimate: PlanEstimate, steps: Sequence[RankStep], hardware: Hardware, hosts: int
) -> list[tuple[str, float | None, float]]:
    """Return rows of `CheckReport.seconds`, of the played rank that waits most.

    The axis of messages is left out, since a rank waits for them in the bubble. So is the step if not all pipeline
    ranks are played.
    """
    player = DevicePlayer(hardware, Placement(build_grid(estimate.config.parallel), hosts))
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
    """Return the pipeline ranks that are checked."""
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
