"""Options of the strategies that average all replicas after some steps of their own. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from colossus.config import Config
from colossus.data_parallel.options.base import Count, PerReplicaOptions

Rate = Annotated[float, Field(gt=0)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class AveragingOptions(PerReplicaOptions):
    #: steps of a round: a replica's own steps between two averages
    period: Count = 8

    def describe(self, data: int) -> str:
        text = super().describe(data)
        return text and f"{text}, averaged every {self.period} steps"


class LocalSGDOptions(AveragingOptions):
    pass


class SlowMoOptions(AveragingOptions):
    #: of the slow step, times the optimizer's own learning rate (alpha)
    slow_lr: Rate = 1.0
    #: of the slow step (beta)
    slow_momentum: Momentum = 0.5
    #: what becomes of the optimizer's state at the end of a round
    buffers: Literal["maintain", "reset"] = "maintain"


class DiLoCoOptions(AveragingOptions):
    period: Count = 30
    outer_lr: Rate = 0.7
    outer_momentum: Momentum = 0.9
    #: whether the outer momentum is Nesterov's
    nesterov: bool = True
    #: parts of the model, whole blocks each, that are averaged in turn: each once in a round
    fragments: Count = 1

    def check(self, config: Config) -> list[str]:
        problems = super().check(config)
        if self.fragments > self.period:
            problems.append(
                f"parallel.strategy.fragments = {self.fragments}: in a round of period = {self.period} steps each "
                f"fragment is averaged after a step of its own, so there are at most {self.period}"
            )
        num_blocks = getattr(config.model, "options", {}).get("num_layers")
        if isinstance(num_blocks, int) and self.fragments > num_blocks:
            problems.append(
                f"parallel.strategy.fragments = {self.fragments}: a fragment is one block of the model or several, and "
                f"model.num_layers = {num_blocks}; use at most {num_blocks}"
            )
        return problems
