"""The predicted cost of a plan: memory of its ranks, seconds of a step by part, bytes by axis. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from colossus.arithmetic import byte_count, counted
from colossus.config import Config
from colossus.schedule.simulate import Span


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that one rank stores between steps.

    Attributes:
        weights: parameters and buffers.
        gradients: gradients.
        optimizer: state of the optimizer.
        update: bytes that the optimizer's step needs on top; an engine's are not counted.
        on_host: the part of weights and optimizer state that is in host memory; an engine's is not counted.
    """

    weights: int
    gradients: int
    optimizer: int
    update: int = 0
    on_host: int = 0


@dataclass(frozen=True)
class RankMemory:
    """The peak memory of a pipeline rank.

    Attributes:
        rank: index along the pipeline axis.
        stages: stages that it runs.
        in_flight: the most microbatches whose activations it holds, see `colossus.schedule.actions.in_flight`.
        stored: bytes that it stores.
        kinds: bytes by kind at its peak (`colossus.planner.memory_play.MemoryPlay.run`); "on the host" is negative.
    """

    rank: int
    stages: tuple[int, ...]
    in_flight: int
    stored: StoredBytes
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        """Return the bytes on the device at the peak."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class PlanMemory:
    """The memory of a plan.

    Attributes:
        ranks: memory of each pipeline rank.
        notes: sentences about memory that is not counted.
    """

    ranks: tuple[RankMemory, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def fullest_rank(self) -> str:
        """Return the name of the fullest rank: ``pipeline rank 0 of 4``, or ``each rank``."""
        return f"pipeline rank {self.fullest.rank} of {len(self.ranks)}" if len(self.ranks) > 1 else "each rank"


@dataclass(frozen=True)
class SearchResult:
    """The plans that fit model, batch, devices and memory.

    Attributes:
        plans: the plans, the best first.
        tried: number of plans that were estimated, or ruled out by a bound.
        nearest: the plan that exceeds the memory least, if none fits.
        seconds: seconds of the search.
        stopped: whether Ctrl-C ended the search early.
        usual: plans that people run by the name of their kind, with the least recomputation that fits, and those that
            do not fit in any way.
    """

    plans: list[PlanEstimate]
    tried: int
    nearest: PlanEstimate | None
    seconds: float
    stopped: bool = False
    usual: Mapping[str, PlanEstimate] = field(default_factory=dict)

    def nothing_fits(self, devices: int, memory: float) -> str:
        """Say that no plan fits, and how much the nearest one needs.

        Args:
            devices: number of devices.
            memory: bytes of each device.
        """
        assert self.nearest is not None
        needed = self.nearest.memory
        most, size = max(needed.fullest.kinds.items(), key=lambda kind: kind[1])
        return (
            f"no plan for {counted(devices, 'device')} of {byte_count(memory)} fits ({self.tried:,} tried). The "
            f"nearest needs {byte_count(needed.fullest.total)} on {needed.fullest_rank}, "
            f"{byte_count(needed.fullest.total - memory)} too much; {byte_count(size)} of it are {most}"
        )


@dataclass(frozen=True)
class AxisCost:
    """The communication of one rank along one axis in a step.

    Attributes:
        bytes: bytes that it sends, as `colossus.comm.accounting` counts them.
        seconds: seconds of its collectives and messages.
        exposed: the part of these seconds in which it computes nothing.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: AxisCost) -> AxisCost:
        return AxisCost(self.bytes + other.bytes, self.seconds + other.seconds, self.exposed + other.exposed)

    def __mul__(self, times: float) -> AxisCost:
        return AxisCost(self.bytes * times, self.seconds * times, self.exposed * times)


@dataclass(frozen=True)
class PlanEstimate:
    """The estimate of a plan.

    Attributes:
        config: the resolved config; its ``parallel``, ``schedule`` and ``train`` sections are the plan.
        overrides: overrides of the user's file that give this plan.
        seconds: seconds of a step.
        tokens: tokens of a step, or what else the loss counts.
        flops: FLOPs of the model in a step, forward and backward, without recomputation; None if nothing counts them.
        peak_flops: peak FLOP/s of all devices; None if the hardware has no peak.
        memory: memory of each pipeline rank.
        axes: cost by the name under which a group of axes is counted ("data", "tensor", "rowxcol", "pipeline", ..), of
            the rank that sends most along it.
        parts: seconds of a step by part, on the pipeline rank that is busy longest: "forward", "backward",
            "recomputation", "over <axes>" (exposed), "optimizer", "bubble" (waiting for other stages, and for the
            slowest rank), "waiting for cores" (if a host has fewer cores than its ranks need). They add up to
            ``seconds``.
        bubble: fraction of a step in which the schedule leaves a rank idle, the mean over pipeline ranks.
        spans: actions of each pipeline rank with start and end in seconds.
    """

    config: Config
    overrides: tuple[str, ...]
    seconds: float
    tokens: float
    flops: float | None
    peak_flops: float | None
    memory: PlanMemory
    axes: Mapping[str, AxisCost]
    parts: Mapping[str, float]
    bubble: float
    spans: Sequence[Sequence[Span]]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @cached_property
    def mfu(self) -> float | None:
        """Return the model FLOP utilisation (see `colossus.monitor.mfu`)."""
        if self.flops is None or not self.peak_flops:
            return None
        return self.flops / self.seconds / self.peak_flops


def extended(few: PlanEstimate, more: PlanEstimate, times: float) -> PlanEstimate:
    """Return the estimate of a plan with more microbatches, by linear extrapolation: few + times x (more - few).

    Both pipelines are in their steady state. Memory and spans are those of ``more``.
    """

    def at(low: float, high: float) -> float:
        return low + times * (high - low)

    none = AxisCost()
    axes = {
        name: few.axes.get(name, none) * (1 - times) + cost * times for name, cost in more.axes.items()
    }  # fmt: skip
    parts = {
        name: max(0.0, at(few.parts.get(name, 0.0), more.parts.get(name, 0.0))) for name in {**few.parts, **more.parts}
    }
    seconds = at(few.seconds, more.seconds)
    return replace(
        more,
        seconds=seconds,
        tokens=at(few.tokens, more.tokens),
        axes=axes,
        parts=parts,
        bubble=at(few.bubble * few.seconds, more.bubble * more.seconds) / seconds,
    )


def are_alike(one: PlanEstimate, other: PlanEstimate) -> bool:
    """Return whether two plans cost the same within a thousandth, as ZeRO 1 and 2 do if gradients are reduced once."""
    pairs = (one.seconds, other.seconds), (one.memory.fullest.total, other.memory.fullest.total)
    return all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs)
