"""What a plan is predicted to cost: the seconds of a step by their parts, bytes by axis, memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from colossus.config import Config
from colossus.planner.rank_memory import PlanMemory
from colossus.schedule.simulate import Span


@dataclass(frozen=True)
class AxisCost:
    """What one rank does along one axis in a step, of the rank that sends most along it.

    Attributes:
        bytes: that it sends, as `colossus.comm.accounting` counts them.
        seconds: of all its collectives and messages there.
        exposed: of these, those in which it computes nothing.
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
    """Of a plan.

    Attributes:
        config: resolved; its ``parallel``, ``schedule`` and ``train`` sections are the plan.
        overrides: what a user types behind the file to have this plan.
        seconds: of a step.
        tokens: (or what else the loss counts) of a step.
        flops: of the model in a step, forward and backward, without recomputation; None where nothing counts them.
        peak_flops: of all devices; None where the hardware names none.
        memory: of the fullest rank of each pipeline rank.
        axes: name of an axis group as it is counted ("data", "tensor", "rowxcol", "pipeline", ..) -> what it costs.
        parts: seconds of a step of the pipeline rank that is busy longest, by part: "forward", "backward",
            "recomputation", "over <axes>" (exposed), "optimizer", "bubble" (also of ranks that wait for the slowest of
            them), "waiting for cores" (of a host that has fewer than ranks); they add up to ``seconds``.
        bubble: mean over pipeline ranks of the share of a step in which a rank has nothing to do for its schedule.
        spans: of each pipeline rank, its actions with start and end in seconds.
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
        """Model FLOP utilisation, see `colossus.monitor.mfu`."""
        if self.flops is None or not self.peak_flops:
            return None
        return self.flops / self.seconds / self.peak_flops


def extended(few: PlanEstimate, more: PlanEstimate, times: float) -> PlanEstimate:
    """Of a plan with more microbatches: what ``more`` has over ``few``, so many times, on top of ``few``.

    Both are in the steady state of their pipeline. Memory and spans are those of ``more``.
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
    """Whether two plans are one for a user, as ZeRO 1 and 2 are where all gradients are reduced at once."""
    return one.seconds == other.seconds and one.memory.fullest.total == other.memory.fullest.total
