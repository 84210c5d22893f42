"""Options of the hooks that keep averages of weights. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from colossus.config.section import Count, CountOrZero, Positive, Section


class AverageOptions(Section):
    """Of all of them."""

    #: steps between two updates of the average
    every: Count = 1
    #: whether the evaluations of `fit` measure the average, too: ``ema_loss`` beside ``loss``
    evaluate: bool = False


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
