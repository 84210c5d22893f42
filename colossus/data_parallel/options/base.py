"""What all strategies' options have in common. No torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from colossus.config import Config
from colossus.config.schema import Parallel, ZeroSection

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]


class StrategyOptions(BaseModel):
    """Options of ``parallel.strategy``: those of a strategy are a subclass, which its class is made with."""

    #: whether all replicas are in the same step
    replicas_keep_step: ClassVar[bool] = True

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

    replicas_keep_step: ClassVar[bool] = False

    #: what is evaluated and exported: the average of the replicas, or each replica's own (exported: the first's)
    evaluate: Literal["average", "own"] = "average"
    #: steps after which the loss of all replicas is logged, beside those of evaluations and checkpoints; 0: none
    log_every: CountOrZero = 0

    def describe(self, data: int) -> str:
        return "inexact: each replica has parameters of its own" if data > 1 else ""
