"""The memory of a plan's ranks, by kind. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that one rank stores.

    Attributes:
        weights: parameters and buffers between steps.
        optimizer: state of the optimizer.
        gradients_between: gradients between steps.
        update: bytes that the optimizer's step needs on top.
        on_host: the part of weights and optimizer state that is in host memory.
    """

    weights: int
    optimizer: int
    gradients_between: int
    update: int
    on_host: int


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
