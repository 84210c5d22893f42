"""What all strategies' options have in common, and those of strategies that average after some own steps. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from colossus.config import Config
from colossus.config.schema import Parallel, ZeroSection

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


def spread_experts(config: Config, what: str) -> list[str]:
    """A problem where experts are spread over data ranks, which a strategy cannot take since ``what``."""
    parallel = config.parallel
    if parallel.expert.size in (1, parallel.sequence.size):
        return []
    return [
        f"parallel.expert = {parallel.expert.size} spreads experts over data ranks, and under parallel.strategy = "
        f"{config.parallel.strategy.type!r} {what}; take an expert size of 1, or the sequence size"
    ]


class StrategyOptions(BaseModel):
    """Options of ``parallel.strategy``: those of a strategy are a subclass, which its class is made with."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def check(self, config: Config) -> list[str]:
        """One line, that begins with the key, for each thing that does not fit the plan; ``parallel.data`` is known."""
        return []

    def describe(self, data: int) -> str:
        """In a few words what it promises, for ``data`` replicas; nothing where all is as in one process."""
        return ""

    def zero_of(self, parallel: Parallel) -> ZeroSection:
        """ZeRO beside this strategy."""
        return parallel.zero


class PerReplicaOptions(StrategyOptions):
    """Of the strategies whose replicas have parameters of their own."""

    #: steps after which the loss of all replicas is logged, beside those of evaluations and checkpoints; 0: none
    log_every: CountOrZero = 0

    def check(self, config: Config) -> list[str]:
        return super().check(config) + spread_experts(config, "each of these has a whole replica")

    def describe(self, data: int) -> str:
        return "inexact: each replica has parameters of its own" if data > 1 else ""


class AveragingOptions(PerReplicaOptions):
    """Of local SGD, and of what averages in rounds as it does."""

    #: steps of a round: a replica's own steps between two averages
    period: Count = 8

    def describe(self, data: int) -> str:
        text = super().describe(data)
        return text and f"{text}, averaged every {self.period} steps"


class SlowMoOptions(AveragingOptions):
    #: of the slow step, times the optimizer's own learning rate (alpha)
    slow_lr: Rate = 1.0
    #: of the slow step (beta)
    slow_momentum: Momentum = 0.5


class DiLoCoOptions(AveragingOptions):
    period: Count = 30
    #: learning rate of the outer step
    outer_lr: Rate = 0.7
    #: momentum of the outer step
    outer_momentum: Momentum = 0.9
    #: whether the outer momentum is Nesterov's
    nesterov: bool = True
