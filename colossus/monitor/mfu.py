"""Model FLOP utilisation: the operations of a model by its formula over those that the devices could have done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from colossus.config import model_options
from colossus.monitor.device_peaks import device_peak

if TYPE_CHECKING:
    from colossus.engine.engine import Engine


@dataclass(frozen=True)
class Utilisation:
    """What turns the speed of a run into its utilisation.

    Recomputed activations are not counted: utilisation is of the model, not of the hardware.

    Attributes:
        flops_per_token: of forward and backward, for each token (or what else the loss counts); 0 where the model's
            options do not say.
        peak: FLOP/s of all devices whose tokens are counted together: of a replica where replicas count for themselves,
            else of the run. None where it is not known.
    """

    flops_per_token: float = 0.0
    peak: float | None = None

    @classmethod
    def of(cls, engine: Engine) -> Utilisation:
        """That of a run, whose devices are taken to be like this rank's."""
        options = model_options(engine.config)
        flops_per_token = getattr(options, "flops_per_token", None)  # a user's own options may not know
        if flops_per_token is None:
            return cls()
        context = engine.context
        counts_alone = not engine.strategy.exact and context.size("data") > 1
        num_devices = context.world_size // (context.size("data") if counts_alone else 1)
        peak = device_peak(engine.device, engine.config.train.precision.compute)
        return cls(float(flops_per_token()), None if peak is None else peak * num_devices)

    def at(self, tokens_per_second: float) -> float | None:
        """The utilisation at a speed; None where it is not known."""
        if self.peak is None or not self.flops_per_token:
            return None
        return tokens_per_second * self.flops_per_token / self.peak
