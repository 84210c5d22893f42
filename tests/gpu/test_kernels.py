"""Ring attention's tiles and merging, and the fused optimizer, on the device against torch's own kernels.

`benchmarks.kernels` has the comparisons, and times the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.device_ranks import DeviceRanks, Devices

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are no part of the installed package

from benchmarks import kernels

SIZES = {"cuda": (16384, 4096), "cpu": (256, 128)}
NAMES = [attention.name for attention in kernels.attentions(*SIZES["cpu"])]


@pytest.mark.parametrize("name", NAMES)
def test_a_ring_is_the_whole_attention(ranks: DeviceRanks, devices: Devices, name: str) -> None:
    if "bf16" in name and ranks.device.type == "cuda" and devices.capability < (8, 0):
        pytest.skip("torch's flash kernels take bf16 on devices of capability 8.0 and more")
    ranks.run_one(check_ring, name)


def check_ring(rank: int, device: torch.device, name: str) -> None:
    (attention,) = (one for one in kernels.attentions(*SIZES[device.type]) if one.name == name)
    kernels.check_ring(attention, device)


def test_adamw_has_the_bits_of_torchs_fused_one(ranks: DeviceRanks) -> None:
    ranks.run_one(check_adamw)


def check_adamw(rank: int, device: torch.device) -> None:
    kernels.check_adamw(device, 200_000_000 if device.type == "cuda" else 100_000)
