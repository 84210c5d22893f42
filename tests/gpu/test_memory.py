"""Memory of the device: steps leave nothing behind, and activation checkpointing saves what it promises."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.training import batch_of, config_of

import colossus

#: with more bytes in the inputs of its blocks than in its gradients
MODEL: dict[str, Any] = dict(num_layers=8, hidden_size=256, num_heads=4, vocab_size=500, seq_len=1024)


def make_engine(precision: str, **train: Any) -> Any:
    return colossus.initialize(config_of({}, 100, precision, model=MODEL, train=train, device="cuda"))


def make_batch(device: torch.device) -> dict[str, torch.Tensor]:
    return {key: value.to(device) for key, value in batch_of(0, MODEL).items()}


def mib(num_bytes: int) -> float:
    return num_bytes / 2**20


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_leave_nothing(
    cuda: torch.device, ranks: DeviceRanks, figures: Callable[[Any], None], precision: str
) -> None:
    figures(ranks.run_one(measure_steps, precision))


def measure_steps(rank: int, device: torch.device, precision: str) -> dict[str, float]:
    engine, batch = make_engine(precision), make_batch(device)
    allocated = []
    for _ in range(10):
        engine.train_step(batch)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated(device))
    peak = torch.cuda.max_memory_allocated(device)
    engine.close()
    assert allocated[-1] <= allocated[3] + 4096, f"MiB after each step: {[round(mib(x), 2) for x in allocated]}"
    return {"MiB between steps": mib(allocated[-1]), "peak MiB": mib(peak)}


def test_a_closed_engine_leaves_nothing(cuda: torch.device, ranks: DeviceRanks, figures: Callable[[Any], None]) -> None:
    figures(ranks.run_one(measure_close))


def measure_close(rank: int, device: torch.device) -> dict[str, float]:
    peak_of_two_steps(device, "none")  # handles of cuBLAS are made once and stay
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    peak_of_two_steps(device, "none")
    gc.collect()
    after = torch.cuda.memory_allocated(device)
    assert after <= before + 4096, f"{mib(after - before):.2f} MiB stay allocated after close()"
    return {"MiB": mib(after)}


def peak_of_two_steps(device: torch.device, checkpointing: str) -> int:
    engine, batch = make_engine("bf16", activation_checkpoint=checkpointing), make_batch(device)
    engine.train_step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    engine.train_step(batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device)
    engine.close()
    return peak


def test_recomputation_saves_memory(cuda: torch.device, ranks: DeviceRanks, figures: Callable[[Any], None]) -> None:
    peaks = ranks.run_one(measure_recomputation)
    figures({f"peak MiB {name}": mib(peak) for name, peak in peaks.items()})
    assert peaks["full"] < peaks["selective"] < peaks["none"], f"peak bytes are {peaks}"


def measure_recomputation(rank: int, device: torch.device) -> dict[str, int]:
    peaks = {}
    for kind in ("none", "selective", "full"):
        peaks[kind] = peak_of_two_steps(device, kind)
        gc.collect()
    return peaks
