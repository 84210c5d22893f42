"""The memory of a plan's ranks, by kind. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that one rank stores.

    Attributes:
        weights: parameters and buffers between steps.
        gathered: the most bytes of gathered whole parameters beyond ``weights`` (ZeRO).
        gradients: the most bytes of gradients while there are activations.
        buffers: buckets of gradients and buffers of gathered parameters, while there are activations.
        optimizer: state of the optimizer.
        update: bytes needed when the activations are freed: by reductions after the last backward, or by the
            optimizer's step.
        gradients_between: gradients between steps.
        on_host: the part of weights, gradients and optimizer state that is in host memory.
    """

    weights: int
    gathered: int
    gradients: int
    buffers: int
    optimizer: int
    update: int
    gradients_between: int
    on_host: int


@dataclass(frozen=True)
class RankMemory:
    """The peak memory of a pipeline rank, in bytes by kind.

    Attributes:
        rank: index along the pipeline axis.
        stages: stages that it runs.
        in_flight: the most microbatches whose activations it holds, see `colossus.schedule.actions.in_flight`.
        stored: bytes that it stores beside activations.
        activations: activations saved for backward, the temporary ones of the largest action, and in a pipeline a value
            that arrives and one that leaves. With one microbatch, gradients are allocated while activations are freed;
            then only the bytes beyond ``stored.gradients`` count here.
    """

    rank: int
    stages: tuple[int, ...]
    in_flight: int
    stored: StoredBytes
    activations: int

    @property
    def kinds(self) -> dict[str, int]:
        """Return the bytes by kind at the peak of the rank: with activations, or with the update if that is more."""
        sizes = dict(vars(self.stored))
        update, on_host = sizes.pop("update"), sizes.pop("on_host")
        del sizes["gradients_between"]
        fullest = {"activations": self.activations} if self.activations >= update else {"update": update}
        return {**sizes, **fullest, "on the host": -on_host}

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
