"""Model FLOP utilisation: the counted operations of a model over the peak of the devices.

Peaks are from the data sheets of vendors (`colossus.hardware.data_sheets`); None where none is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from colossus.construct.build_model import build
from colossus.context.parallel_context import one_rank
from colossus.hardware.data_sheets import peak_flops
from colossus.registry import MODELS

if TYPE_CHECKING:
    from colossus.engine.engine import Engine


@dataclass(frozen=True)
class Utilisation:
    """The factors between the speed of a run and its utilisation.

    Recomputed activations are not counted: utilisation is of the model, not of the hardware.

    Attributes:
        flops_per_token: FLOPs of forward and backward for each token (or other unit that the loss counts); 0 if
            unknown.
        peak: FLOP/s of all devices whose tokens are counted together: of a replica if replicas do not wait for each
            other, else of the run. None if it is unknown.
    """

    flops_per_token: float = 0.0
    peak: float | None = None

    @classmethod
    def of(cls, engine: Engine) -> Utilisation:
        """Return the utilisation of a run, whose devices are assumed to be like this rank's."""
        model, context = engine.config.model, engine.context
        peak = device_peak(engine.device, engine.config.train.precision.compute)
        if model is None or peak is None:  # counting takes a second
            return cls()
        counts_alone = not engine.strategy.exact and context.size("data") > 1
        num_devices = context.world_size // (context.size("data") if counts_alone else 1)
        key = repr(model.spec())
        if key not in _counted:
            _counted[key] = flops_per_token(model.spec()) or 0.0
        return cls(_counted[key], peak * num_devices)

    def at(self, tokens_per_second: float) -> float | None:
        """Return the utilisation at a speed; None if it is unknown."""
        if self.peak is None or not self.flops_per_token:
            return None
        return tokens_per_second * self.flops_per_token / self.peak


#: spec of a model -> its FLOPs, which the rows of metrics and the display ask for
_counted: dict[str, float] = {}


def flops_per_token(model: Mapping[str, Any]) -> float | None:
    """Return floating-point operations per token (or other unit that the loss counts), forward and backward.

    torch's FlopCounterMode counts them in one sample, on the meta device, of the whole model on one rank: two for each
    multiplication of a matmul, none for lookups, norms and biases. Attention is counted as its two matmuls of [tokens,
    tokens] per head, causal or not. Recomputation (activation checkpointing, flash attention's backward) is not
    counted. So count PaLM (2204.02311, appendix B) and Megatron-LM (2104.04473), whose utilisations are comparable to
    ours.

    Args:
        model: ``dict(type=.., **options)``.

    Returns:
        None for a model without ``example_batch()``, and for one whose forward or loss reads values.
    """
    spec = {key: value for key, value in model.items() if key != "activation_checkpoint"}
    context = one_rank()
    try:
        whole: Any = build(lambda: MODELS.build(spec), context, materialize=False).eval()  # no random numbers on meta
        batch = whole.example_batch()
        with context, FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss, _ = whole.loss(whole(batch["inputs"]), batch)
            loss.backward()
    except Exception:  # a user's model may do anything; it trains all the same
        return None
    return float(counter.get_total_flops() / batch["labels"].numel())


def device_peak(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of this rank's device; None for CPUs, whose clocks are unknown."""
    if device.type != "cuda":
        return None
    # `matmul.allow_tf32` raises once this newer setting has a value that it cannot express
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)
