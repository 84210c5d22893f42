"""The most memory that a rank has used."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from colossus.machine import peak_resident_bytes


@dataclass(frozen=True)
class PeakMemory:
    """Bytes, since the process began or somebody called `torch.cuda.reset_peak_memory_stats`; we never do, since the
    peak is the process's and others may be counting.

    Attributes:
        allocated: of tensors on the rank's GPU; on the CPU the process's resident memory.
        reserved: what torch's allocator had taken from the GPU for them, and nobody else could have; None on the CPU.
            Far above ``allocated`` it is fragmented.
    """

    allocated: int
    reserved: int | None = None


def peak_memory(device: torch.device) -> PeakMemory:
    """Of this rank. Nothing is waited for: the allocator works on the host."""
    if device.type != "cuda":
        return PeakMemory(peak_resident_bytes())
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # read once, for both
    return PeakMemory(*(stats[f"{kind}_bytes"]["all"]["peak"] if stats else 0 for kind in ("allocated", "reserved")))
