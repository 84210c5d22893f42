"""The base of all strategies' options, and the options of strategies of rounds. No torch."""

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
    """Return a problem where experts are spread over data ranks, which a strategy does not support because ``what``."""
    parallel = config.parallel
    if parallel.expert.size in (1, parallel.sequence.size):
        return []
    return [
        f"parallel.expert = {parallel.expert.size} spreads experts over data ranks, and under parallel.strategy = "
        f"{config.parallel.strategy.type!r} {what}; take an expert size of 1, or the sequence size"
    ]


class StrategyOptions(BaseModel):
    """The base of the options of ``parallel.strategy``; each strategy is made with a subclass."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def check(self, config: Config) -> list[str]:
        """Return a line, which begins with the key, for each option that does not fit; ``parallel.data`` is set."""
        return []

    def describe(self, data: int) -> str:
        """Return a few words on what ``data`` replicas promise; empty where a run is the same as in one process."""
        return ""

    def zero_of(self, parallel: Parallel) -> ZeroSection:
        """Return the ZeRO section of a run with this strategy."""
        return parallel.zero


class PerReplicaOptions(StrategyOptions):
    """The options of strategies whose replicas have parameters of their own."""

    #: the loss of all replicas is logged after this many steps, beside evaluations and checkpoints; 0: only there
    log_every: CountOrZero = 0

    def check(self, config: Config) -> list[str]:
        return super().check(config) + spread_experts(config, "each of these has a whole replica")

    def describe(self, data: int) -> str:
        return "inexact: each replica has parameters of its own" if data > 1 else ""


class AveragingOptions(PerReplicaOptions):
    """The options of local SGD, and the base of those of other strategies of rounds."""

    #: the steps of a round: a replica's own steps between two averages
    period: Count = 8

    def describe(self, data: int) -> str:
        text = super().describe(data)
        return text and f"{text}, averaged every {self.period} steps"


class SlowMoOptions(AveragingOptions):
    #: the learning rate of the slow step, times the optimizer's own (alpha)
    slow_lr: Rate = 1.0
    #: the momentum of the slow step (beta)
    slow_momentum: Momentum = 0.5


class DiLoCoOptions(AveragingOptions):
    period: Count = 30
    #: the learning rate of the outer step
    outer_lr: Rate = 0.7
    #: the momentum of the outer step
    outer_momentum: Momentum = 0.9
    #: whether the outer momentum is Nesterov's
    nesterov: bool = True
