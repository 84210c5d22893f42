"""Peaks of devices, for the model FLOP utilisation: None where a peak is not known, never a guess."""

from __future__ import annotations

import torch

# Dense peaks in TFLOP/s from the vendors' data sheets, without sparsity: name -> precision -> peak.
# The first entry whose name is in the device's name counts.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "H100 PCIe": {"bf16": 756.0, "tf32": 378.0, "fp32": 51.0, "fp64": 51.0},
    "H100 NVL": {"bf16": 835.0, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
    "H100": {"bf16": 989.5, "tf32": 494.5, "fp32": 67.0, "fp64": 67.0},
    "H200": {"bf16": 989.5, "tf32": 494.5, "fp32": 67.0, "fp64": 67.0},
    "A100": {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5},
    "A30": {"bf16": 165.0, "tf32": 82.0, "fp32": 10.3, "fp64": 10.3},
    "V100": {"fp32": 15.7, "fp64": 7.8},
    "L40S": {"bf16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "T4": {"fp32": 8.1},
}


def peak_flops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a GPU by its name, None when no peak is known for it at this precision."""
    kind = "tf32" if precision == "fp32" and tf32 else precision
    for name, peaks in PEAK_TFLOPS.items():
        if name in device_name:
            return peaks[kind] * 1e12 if kind in peaks else None
    return None


def device_peak(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of this rank's device; None on CPUs, whose peak depends on clocks that nobody can look up."""
    if device.type != "cuda":
        return None
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)
