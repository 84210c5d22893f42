"""Options of the hooks that keep averages of weights. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from colossus.config import Config
from colossus.config.plans import strategy_options
from colossus.config.section import Count, CountOrZero, Positive, Section


class AverageOptions(Section):
    """Of all of them."""

    #: steps between two updates of the average
    every: Count = 1
    #: whether the evaluations of `fit` measure the average, too: ``ema_loss`` beside ``loss``
    evaluate: bool = False

    def check(self, config: Config) -> list[str]:
        """What does not fit the plan; ``parallel.data`` is known."""
        strategy = strategy_options(config)
        differ = strategy is not None and strategy.replicas_differ and config.parallel.data != 1
        return [own_parameters(str(config.parallel.strategy.type))] if differ else []


def own_parameters(strategy: str) -> str:
    """Why no average is kept of replicas that differ."""
    return (
        f"under {strategy} each replica has weights of its own, and an average of those of one is not the run's: leave "
        f"the hook out, or take an exact strategy (all_reduce, zero)"
    )


class EMAOptions(AverageOptions):
    """One of ``decay`` and ``half_life``."""

    #: what is left of the average at an update; 1 - decay is the weight of the new values
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    #: steps after which half of the average is of newer weights: decay = 0.5 ** (every / half_life)
    half_life: Positive | None = None
    #: the decay is at most (1 + t) / (10 + t) after t updates, so that the first weights are soon forgotten
    warmup: bool = False

    @model_validator(mode="after")
    def _one(self) -> EMAOptions:
        if (self.decay is None) == (self.half_life is None):
            given = "both" if self.decay is not None else "neither"
            raise ValueError(f"needs decay (0.999, say) or half_life (in steps), and was given {given}")
        return self

    @property
    def decay_of_update(self) -> float:
        if self.decay is not None:
            return self.decay
        assert self.half_life is not None
        return float(0.5 ** (self.every / self.half_life))


class SWAOptions(AverageOptions):
    #: the step whose weights are the first in the average
    start: CountOrZero
