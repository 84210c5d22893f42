"""Model FLOP utilisation: the operations of a model, counted, over those that the devices could have done.

Peaks are from the data sheets of vendors; None where none is known, no guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from colossus.construct.build_model import build
from colossus.context.parallel_context import one_rank
from colossus.registry import MODELS

if TYPE_CHECKING:
    from colossus.engine.engine import Engine


@dataclass(frozen=True)
class Utilisation:
    """What turns the speed of a run into its utilisation.

    Recomputed activations are not counted: utilisation is of the model, not of the hardware.

    Attributes:
        flops_per_token: of forward and backward, for each token (or what else the loss counts); 0 where
            nothing counts them.
        peak: FLOP/s of all devices whose tokens are counted together: of a replica where replicas count for themselves,
            else of the run. None where it is not known.
    """

    flops_per_token: float = 0.0
    peak: float | None = None

    @classmethod
    def of(cls, engine: Engine) -> Utilisation:
        """That of a run, whose devices are taken to be like this rank's."""
        model, context = engine.config.model, engine.context
        peak = device_peak(engine.device, engine.config.train.precision.compute)
        if model is None or peak is None:  # counting takes a second
            return cls()
        counts_alone = not engine.strategy.exact and context.size("data") > 1
        num_devices = context.world_size // (context.size("data") if counts_alone else 1)
        return cls(flops_per_token(model.spec()) or 0.0, peak * num_devices)

    def at(self, tokens_per_second: float) -> float | None:
        """The utilisation at a speed; None where it is not known."""
        if self.peak is None or not self.flops_per_token:
            return None
        return tokens_per_second * self.flops_per_token / self.peak


def flops_per_token(model: Mapping[str, Any]) -> float | None:
    """Floating-point operations per token (or what else the loss counts), forward and backward.

    torch's FlopCounterMode counts them in one sample, on the meta device, of the whole model on one rank: two for each
    multiplication of a matmul, none for lookups, norms and biases. Attention is counted as its two matmuls of
    [tokens, tokens] per head, causal or not, and recomputation (activation checkpointing, flash attention's backward)
    is not counted: so do PaLM (2204.02311, appendix B) and Megatron-LM (2104.04473), with whose utilisations ours is
    to be compared.

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
    except Exception:  # a user's own may do anything; it trains all the same
        return None
    return float(counter.get_total_flops() / batch["labels"].numel())


# -- peaks of devices -----------------------------------------------------------------------------------------

KINDS = ("fp16", "bf16", "tf32", "fp32", "fp64")
# Dense TFLOP/s per device, without sparsity: where a sheet gives only numbers with sparsity (Hopper, Ada, Blackwell)
# they are halved. fp64 and, of AMD, fp32 are those of the matrix units where there are such. Products of fp16 and bf16
# are accumulated in fp32, as torch has them accumulated: on GeForce that is half of the number in large print.
#: short name -> peaks by `KINDS`, None where there is none or none is known; from data sheets and whitepapers
PEAK_TFLOPS: dict[str, tuple[float | None, ...]] = {
    "B200": (2250.0, 2250.0, 1125.0, 75.0, 37.0),
    "B300": (2250.0, 2250.0, 1125.0, None, None),
    "GB200": (2500.0, 2500.0, 1250.0, 80.0, 40.0),
    "GB300": (2500.0, 2500.0, 1250.0, None, None),
    "H100": (989.5, 989.5, 494.5, 67.0, 67.0),
    "H100 PCIE": (756.5, 756.5, 378.0, 51.0, 51.0),
    "H100 NVL": (835.5, 835.5, 417.5, 60.0, 60.0),
    "H200": (989.5, 989.5, 494.5, 67.0, 67.0),
    "H200 NVL": (835.5, 835.5, 417.5, 60.0, 60.0),
    "GH200": (989.5, 989.5, 494.5, 67.0, 67.0),
    "L4": (121.0, 121.0, 60.0, 30.3, None),
    "L40": (181.05, 181.05, 90.5, 90.5, None),
    "L40S": (362.05, 362.05, 183.0, 91.6, None),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6, None),
    "RTX 5090": (209.5, 209.5, 104.8, 104.8, None),
    "A100": (312.0, 312.0, 156.0, 19.5, 19.5),
    "A100 PCIE": (312.0, 312.0, 156.0, 19.5, 19.5),
    "A40": (149.7, 149.7, 74.8, 37.4, None),
    "A10": (125.0, 125.0, 62.5, 31.2, None),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7, None),
    "RTX 3090": (71.0, 71.0, 35.6, 35.6, None),
    "T4": (65.0, None, None, 8.1, None),
    "V100 SXM2": (125.0, None, None, 15.7, 7.8),
    "V100 PCIE": (112.0, None, None, 14.0, 7.0),
    "MI300X": (1307.4, 1307.4, None, 163.4, 163.4),
    "MI325X": (1307.4, 1307.4, None, 163.4, 163.4),
}
_NO_NAME = re.compile(r"NVIDIA|TESLA|GEFORCE|AMD|INSTINCT|HBM3|SXM[456]|OAM|AC|\d+GB")


def short_name(device_name: str) -> str:
    """Without vendor, series and size of memory: ``NVIDIA H100 80GB HBM3`` is ``H100``.

    All else stays: a slice (``H100 MIG 1G.10GB``), a ``RTX 4090 LAPTOP GPU`` and an ``A10G`` are other devices.
    """
    return " ".join(word for word in re.split(r"[\s-]+", device_name.upper()) if not _NO_NAME.fullmatch(word))


def peak_flops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a GPU by its name, None when no peak is known for it at this precision.

    Args:
        precision: ``fp64``, ``fp32``, ``bf16`` or ``fp16``, of the operands of products.
        tf32: whether products of fp32 may be taken in TensorFloat-32; devices that have none take them in fp32.
    """
    peaks = dict(zip(KINDS, PEAK_TFLOPS.get(short_name(device_name), ()), strict=False))
    kind = "tf32" if precision == "fp32" and tf32 and peaks.get("tf32") else precision
    peak = peaks.get(kind)
    return None if peak is None else peak * 1e12


def device_peak(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of this rank's device; None on CPUs, whose peak depends on clocks that nobody can look up."""
    if device.type != "cuda":
        return None
    # `matmul.allow_tf32` raises once this newer setting of torch was set to what that cannot say
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)
