"""How many operations a second devices can do, from their vendors' data sheets; None where none is known, no guess."""

from __future__ import annotations

import os
import re

import torch

_Peaks = dict[str, float]


def _tensor_cores(low: float, **others: float) -> _Peaks:
    """Of a device whose products of bf16 and of fp16, both accumulated in fp32, are equally fast."""
    return {"bf16": low, "fp16": low, **others}


# Dense TFLOP/s per device, without sparsity: where a sheet gives only numbers with sparsity (Hopper, Ada, Blackwell)
# they are halved. fp64 and, of AMD, fp32 are those of the matrix units where there are such. Products of fp16 and bf16
# are accumulated in fp32, as torch has them accumulated: on GeForce that is half of the number in large print.
#: short name -> precision -> peak
PEAK_TFLOPS: dict[str, _Peaks] = {
    # NVIDIA Blackwell: HGX B200 / B300 and GB200 / GB300 NVL72 pages, divided by their 8 and 72 GPUs
    "B200": _tensor_cores(2250.0, tf32=1125.0, fp32=75.0, fp64=37.0),
    "B300": _tensor_cores(2250.0, tf32=1125.0),
    "GB200": _tensor_cores(2500.0, tf32=1250.0, fp32=80.0, fp64=40.0),
    "GB300": _tensor_cores(2500.0, tf32=1250.0),
    # NVIDIA H100, H200 and GH200 data sheets
    "H100": _tensor_cores(989.5, tf32=494.5, fp32=67.0, fp64=67.0),
    "H100 PCIE": _tensor_cores(756.5, tf32=378.0, fp32=51.0, fp64=51.0),
    "H100 NVL": _tensor_cores(835.5, tf32=417.5, fp32=60.0, fp64=60.0),
    "H200": _tensor_cores(989.5, tf32=494.5, fp32=67.0, fp64=67.0),
    "H200 NVL": _tensor_cores(835.5, tf32=417.5, fp32=60.0, fp64=60.0),
    "GH200": _tensor_cores(989.5, tf32=494.5, fp32=67.0, fp64=67.0),
    # NVIDIA Ada: L4, L40, L40S data sheets; RTX 4090 and 4080 in the Ada architecture whitepaper
    "L4": _tensor_cores(121.0, tf32=60.0, fp32=30.3),
    "L40": _tensor_cores(181.05, tf32=90.5, fp32=90.5),
    "L40S": _tensor_cores(362.05, tf32=183.0, fp32=91.6),
    "RTX 6000 ADA GENERATION": _tensor_cores(364.2, tf32=182.1, fp32=91.1),
    "RTX 4090": _tensor_cores(165.2, tf32=82.6, fp32=82.6),
    "RTX 4080": _tensor_cores(97.5, tf32=48.7, fp32=48.7),
    # NVIDIA RTX Blackwell architecture whitepaper
    "RTX 5090": _tensor_cores(209.5, tf32=104.8, fp32=104.8),
    # NVIDIA Ampere: A100, A30, A40, A10 data sheets; RTX in the GA102 whitepaper
    "A100": _tensor_cores(312.0, tf32=156.0, fp32=19.5, fp64=19.5),
    "A800": _tensor_cores(312.0, tf32=156.0, fp32=19.5, fp64=19.5),
    "A30": _tensor_cores(165.0, tf32=82.0, fp32=10.3, fp64=10.3),
    "A40": _tensor_cores(149.7, tf32=74.8, fp32=37.4),
    "A10": _tensor_cores(125.0, tf32=62.5, fp32=31.2),
    "RTX A6000": _tensor_cores(154.8, tf32=77.4, fp32=38.7),
    "RTX 3090": _tensor_cores(71.0, tf32=35.6, fp32=35.6),
    # NVIDIA T4 and V100 data sheets: no bf16, no tf32
    "T4": {"fp16": 65.0, "fp32": 8.1},
    "V100 SXM2": {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8},
    "V100 PCIE": {"fp16": 112.0, "fp32": 14.0, "fp64": 7.0},
    "V100S PCIE": {"fp16": 130.0, "fp32": 16.4, "fp64": 8.2},
    # AMD Instinct data sheets; their tf32 has to be asked for in ways that are not looked for here
    "MI300X": _tensor_cores(1307.4, fp32=163.4, fp64=163.4),
    "MI325X": _tensor_cores(1307.4, fp32=163.4, fp64=163.4),
    "MI300A": _tensor_cores(980.6, fp32=122.6, fp64=122.6),
    "MI210": _tensor_cores(181.0, fp32=45.3, fp64=45.3),
}
#: other names of the same
_SAME = {
    "H100 HBM3": "H100",
    "H100 SXM5": "H100",
    "A100 SXM4": "A100",
    "A100 PCIE": "A100",
    "A800 SXM4": "A800",
    "A800 PCIE": "A800",
    "B300 SXM6 AC": "B300",
    "MI300X OAM": "MI300X",
    "MI325X OAM": "MI325X",
}
_NO_NAME = re.compile(r"NVIDIA|TESLA|GEFORCE|AMD|INSTINCT|\d+GB")


def short_name(device_name: str) -> str:
    """Without vendor, series and size of memory: ``NVIDIA H100 80GB HBM3`` is ``H100``.

    All else stays: a slice (``H100 MIG 1G.10GB``), a ``RTX 4090 LAPTOP GPU`` and an ``A10G`` are other devices.
    """
    words = [word for word in re.split(r"[\s-]+", device_name.upper()) if not _NO_NAME.fullmatch(word)]
    name = " ".join(words)
    return _SAME.get(name, name)


def peak_flops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a GPU by its name, None when no peak is known for it at this precision.

    Args:
        precision: ``fp64``, ``fp32``, ``bf16`` or ``fp16``, of the operands of products.
        tf32: whether products of fp32 may be taken in TensorFloat-32; devices that have none take them in fp32.
    """
    peaks = PEAK_TFLOPS.get(short_name(device_name), {})
    kind = "tf32" if precision == "fp32" and tf32 and "tf32" in peaks else precision
    return peaks[kind] * 1e12 if kind in peaks else None


def uses_tf32() -> bool:
    """Whether products of fp32 are taken in TensorFloat-32, however torch was told so.

    `torch.backends.cuda.matmul.allow_tf32` raises once the newer ``fp32_precision`` was set to what it cannot say.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # NVIDIA's libraries then take none, whatever torch asks for
        return False
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def device_peak(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of this rank's device; None on CPUs, whose peak depends on clocks that nobody can look up."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision, tf32=uses_tf32())
