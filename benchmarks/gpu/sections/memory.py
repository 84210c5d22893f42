"""Memory of the device: steps leave nothing behind, and what is to save memory does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from helpers.training import batch_of, config_of

import colossus
from benchmarks.gpu.section import Case, Figures, LeftOut

#: with more bytes in the inputs of its blocks than in its gradients
MODEL: dict[str, Any] = dict(num_layers=8, hidden_size=256, num_heads=4, vocab_size=500, seq_len=1024)
RECOMPUTED: dict[str, Any] = {
    "none": "none",
    "selective": "selective",
    "full": "full",
}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    for precision in ("fp32", "bf16", "fp16"):
        yield Case(f"{precision}: steps leave nothing", partial(_leaves_nothing, device, precision))
    yield Case("a closed engine leaves nothing", partial(_is_given_back, device))
    yield Case("recomputation saves memory", partial(_recomputation, device))


def _engine(device: torch.device, precision: str, **train: Any) -> Any:
    if device.type != "cuda":
        raise LeftOut("no CUDA device: torch counts the memory of CUDA devices alone")
    return colossus.initialize(config_of({}, 100, precision, model=MODEL, train=train, device="cuda"))


def _batch(device: torch.device) -> dict[str, torch.Tensor]:
    return {key: value.to(device) for key, value in batch_of(0, MODEL).items()}


def _mib(num_bytes: int) -> float:
    return num_bytes / 2**20


def _leaves_nothing(device: torch.device, precision: str) -> Figures:
    engine, batch = _engine(device, precision), _batch(device)
    held = []
    for _ in range(10):
        engine.train_step(batch)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated(device))
    peak = torch.cuda.max_memory_allocated(device)
    engine.close()
    assert held[-1] <= held[3] + 4096, f"MiB after each step: {[round(_mib(each), 2) for each in held]}"
    return {"MiB between steps": _mib(held[-1]), "peak MiB": _mib(peak)}


def _is_given_back(device: torch.device) -> Figures:
    _run(device, "none")  # what is made once and stays: handles of cuBLAS
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    _run(device, "none")
    gc.collect()
    after = torch.cuda.memory_allocated(device)
    assert after <= before + 4096, f"{_mib(after - before):.2f} MiB stay allocated after close()"
    return {"MiB": _mib(after)}


def _run(device: torch.device, kind: Any) -> int:
    """Peak bytes of two steps."""
    engine, batch = _engine(device, "bf16", activation_checkpoint=kind), _batch(device)
    engine.train_step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    engine.train_step(batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device)
    engine.close()
    return peak


def _recomputation(device: torch.device) -> Figures:
    peaks = {}
    for name, kind in RECOMPUTED.items():
        peaks[name] = _run(device, kind)
        gc.collect()
    assert peaks["full"] < peaks["selective"] < peaks["none"], f"peak bytes are {peaks}"
    return {f"peak MiB {name}": _mib(peak) for name, peak in peaks.items()}
