"""The collectives of weights, gradients and a step's numbers that a pipeline rank starts in a step, and when.

What activations send is not here: nor is what tensor parallelism sends of weights (`colossus.tensor_parallel.traffic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from colossus.comm import accounting
from colossus.config import Config
from colossus.planner.parameter_facts import ModelFacts
from colossus.planner.rank_stages import RankStages


@dataclass(frozen=True)
class Collective:
    """One that a rank starts.

    Attributes:
        operation, axes, dtype: as `colossus.comm.accounting` counts them.
        ranks: of its group.
        held: bytes that a rank holds before.
        mesh_axes: over which its ranks lie, of the plan's grid.
    """

    operation: str
    axes: str
    ranks: int
    held: int
    dtype: str
    mesh_axes: tuple[str, ...]

    @property
    def sent(self) -> float:
        """Bytes that this rank sends."""
        return accounting.sent(self.operation.partition(" ")[0], self.ranks, self.held)


@dataclass(frozen=True)
class BlockGather:
    """The weights of a block that is freed within a step (ZeRO-3).

    Attributes:
        stage, block: that needs them; the gather starts while the block before it runs.
        in_backward: whether they are gathered again for each backward, which they are where each forward frees them.
    """

    stage: int
    block: int
    in_backward: bool
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Reduction:
    """Gradients that travel together.

    Attributes:
        stage, block: with whose backward the last of them is made; None: they wait until the stage is reduced.
        when: "each": in each backward of the stage (where a schedule splits them, behind its weights' half). "last": in
            its last one of the step.
        collectives: one after the other.
    """

    stage: int
    block: int | None
    when: Literal["each", "last"]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class StepTraffic:
    """Of one pipeline rank in a step.

    Attributes:
        begin: before the first forward: weights that are whole for all of the step.
        gathers: of blocks that are not, in the order of the chain.
        gathered: of those, (stage, microbatch) of each forward that finds them freed.
        reductions: in the order in which they start.
        end: behind the last backward and all reductions, one after the other.
        counted: how often each collective of the step is started, in the end.
    """

    begin: tuple[Collective, ...]
    gathers: tuple[BlockGather, ...]
    gathered: frozenset[tuple[int, int]]
    reductions: tuple[Reduction, ...]
    end: tuple[Collective, ...]


def gradient_traffic(
    model: ModelFacts,
    config: Config,
    stages: RankStages,
    *,
    on_cpu: bool = False,
    ranks_per_host: int | None = None,
) -> StepTraffic:
    """The collectives of an exact strategy (all_reduce, zero, hierarchical).

    Args:
        config: resolved, of a plan whose layout is that of ``model``.
        on_cpu: whether ranks compute on CPU, where what travels has to fit a slot of shared memory.
        ranks_per_host: data ranks on each host, where ``hierarchical`` finds them; None: all.
    """
    raise NotImplementedError


def all_collectives(traffic: StepTraffic, stages: RankStages) -> Sequence[tuple[Collective, int]]:
    """Each collective of a step, and how often it is started in it."""
    raise NotImplementedError
