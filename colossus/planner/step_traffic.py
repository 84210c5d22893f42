"""The collectives of weights and gradients of one pipeline rank in a step, with their times and bytes. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from colossus.comm import accounting
from colossus.planner.plan_stages import RankStages
from colossus.schedule.actions import LAST_USE


@dataclass(frozen=True)
class Collective:
    """A collective that a rank starts.

    Attributes:
        operation, axes: the names under which `colossus.comm.accounting` counts it.
        ranks: size of its group.
        input_bytes: bytes of a rank's input.
        mesh_axes: axes of the plan's grid along which its ranks lie; empty if they share a host.
    """

    operation: str
    axes: str
    ranks: int
    input_bytes: float
    mesh_axes: tuple[str, ...]

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends."""
        return accounting.sent(self.operation.partition(" ")[0], self.ranks, self.input_bytes)

    @property
    def result_bytes(self) -> float:
        """Return the bytes of a rank's result."""
        if self.operation.startswith("all_gather"):
            return self.input_bytes * self.ranks
        return self.input_bytes / (self.ranks if self.operation.startswith("reduce_scatter") else 1)


@dataclass(frozen=True)
class BlockGather:
    """The gather of a block's weights, which are freed within the step (ZeRO-3).

    Attributes:
        stage, block: the block that needs them; the gather starts while the block before it runs.
        in_backward: whether each backward gathers them again, because each forward frees them.
        collectives: the collectives, one after the other; none over a single rank.
        whole: bytes of the gathered weights.
        buffers: bytes of the collectives' inputs and results.
        gradients: bytes of the gradients of these weights, before their reduction.
    """

    stage: int
    block: int
    in_backward: bool
    collectives: tuple[Collective, ...]
    whole: int
    buffers: float
    gradients: int


@dataclass(frozen=True)
class Reduction:
    """The reduction of gradients that travel together.

    Attributes:
        stage: stage of the parameters.
        block: the block whose backward completes the last gradient; None if they wait for the end of the stage.
        when: "each" for a reduction in each backward of the stage (or wgrad, if the schedule splits it), "last" for one
            in the last backward of the step.
        collectives: the collectives, one after the other; none over a single rank.
        freed: bytes of whole gradients that are freed when it starts; buckets are not counted here.
        buffers: bytes that it needs until it has ended, buckets not counted.
        sums: bytes of the sums that stay from then on.
    """

    stage: int
    block: int | None
    when: Literal["each", "last"]
    collectives: tuple[Collective, ...]
    freed: int = 0
    buffers: float = 0.0
    sums: int = 0


@dataclass(frozen=True)
class StepTraffic:
    """The collectives of one pipeline rank in a step.

    Attributes:
        begin: collectives before the first forward: gathers of weights that stay whole for the step.
        gathers: gathers of other blocks, in the order of the chain.
        gathered: (stage, microbatch) of each forward that has to gather freed weights.
        reductions: reductions of each stage, in the order in which they start.
        end: collectives after the last backward and all reductions, one after the other.
        whole: bytes of weights that are gathered for the step, beyond those that are stored (ZeRO-3).
        buckets: bytes of all buckets of gradients, which are allocated once.
        made: for each block, the bytes of gradients that its backward makes and that stay in a step: all but those of
            weights that are gathered for the block, and those in buckets. The block of a gradient is the last of the
            rank that uses it.
        bucketed: bytes of the gradients that are views of buckets.
    """

    begin: tuple[Collective, ...]
    gathers: tuple[BlockGather, ...]
    gathered: frozenset[tuple[int, int]]
    reductions: tuple[Reduction, ...]
    end: tuple[Collective, ...]
    whole: int
    buckets: float
    made: Counter[int]
    bucketed: int

    def counts(self, stages: RankStages) -> Counter[Collective]:
        """Return how often each collective is started in a step."""
        forwards = Counter(stage for stage, _ in self.gathered)
        backwards = Counter(action.stage for action in stages.actions if action.kind in LAST_USE)
        counts: Counter[Collective] = Counter((*self.begin, *self.end))
        for gather in self.gathers:
            times = forwards[gather.stage] + gather.in_backward * backwards[gather.stage]
            for collective in gather.collectives:
                counts[collective] += times
        for reduction in self.reductions:
            for collective in reduction.collectives:
                counts[collective] += backwards[reduction.stage] if reduction.when == "each" else 1
        return counts
