"""The memory of a plan's ranks, by kind. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StoredBytes:
    """Of one rank.

    Attributes:
        weights: parameters and buffers between steps.
        gathered: whole parameters at most in a step, beyond ``weights`` (ZeRO).
        gradients: at most while there are activations.
        buffers: in which gradients are reduced and parameters gathered, while there are activations.
        optimizer: its state.
        update: what comes when the activations have gone: reductions after the last backward, the optimizer's step.
        gradients_between: what is left of them between steps.
        on_host: of weights, gradients and the optimizer's state, what is in the memory of the host.
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
    """Bytes of a rank of the pipeline at most, by kind.

    Attributes:
        rank: index along the pipeline axis.
        stages: that it runs.
        in_flight: activations that it holds at most, see `colossus.schedule.actions.in_flight`.
        activations: what is kept for backward of these, what the fullest action needs on top, and in a pipeline a value
            that arrives and one that leaves. With one microbatch gradients come as activations go, so that a part of
            the gradients is counted against them.
    """

    rank: int
    stages: tuple[int, ...]
    in_flight: int
    stored: StoredBytes
    activations: int

    @property
    def kinds(self) -> dict[str, int]:
        """By kind, while the rank is fullest: with activations, or, where that is more, with the update."""
        sizes = dict(vars(self.stored))
        update, on_host = sizes.pop("update"), sizes.pop("on_host")
        del sizes["gradients_between"]
        fullest = {"activations": self.activations} if self.activations >= update else {"update": update}
        return {**sizes, **fullest, "on the host": -on_host}

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class PlanMemory:
    """Of a plan.

    Attributes:
        ranks: one of each pipeline rank.
        notes: what is not counted, in words.
    """

    ranks: tuple[RankMemory, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def fullest_rank(self) -> str:
        """``pipeline rank 0 of 4``, or ``each rank``."""
        return f"pipeline rank {self.fullest.rank} of {len(self.ranks)}" if len(self.ranks) > 1 else "each rank"
