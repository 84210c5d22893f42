"""Steps whose batches come from a loader beside steps with a batch that is on the device: what reading and copying cost
that the device does not hide."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import colossus
from benchmarks.common import Spread, ratio
from benchmarks.gpu.section import Case, Figures, LeftOut
from benchmarks.timing import seconds_per_call, take_turns
from benchmarks.undrawn import fill, undrawn

#: a step on windows of tokens takes on a GPU at most that many times as long as one without a loader
SLOWEST = 1.15
NUM_SAMPLES = 1 << 20
#: batches of each worker, as torch's DataLoader has it
READ_AHEAD = 2


@dataclass(frozen=True)
class Windows(Dataset[Any]):
    """Sample i begins at token i of a text that is in memory."""

    seq_len: int
    vocab: int

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(self.seq_len + 1) * 31 + index) % self.vocab
        return {"inputs": ids[:-1], "labels": ids[1:]}


class Images(Dataset[Any]):
    """Images [3, side, side] that are in memory as they are wanted: what is measured is collating and copying."""

    def __init__(self, side: int) -> None:
        self.pixels = torch.randn(16, 3, side, side, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.pixels[index % len(self.pixels)], "labels": torch.tensor(index % 10)}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    on_gpu = device.type == "cuda"
    share = budget / 4
    for workers in (0, 2):
        for kind, config in (("tokens", of_tokens(on_gpu)), ("images", of_images(on_gpu))):
            run = partial(_run, device, config, workers, share / 2, judged=on_gpu and kind == "tokens")
            yield Case(f"{kind}, {workers} workers", run, seconds=max(4 * share, 60))


def of_tokens(on_gpu: bool) -> dict[str, Any]:
    """A GPT: batches are small, steps long."""
    hidden, layers, tokens, batch, vocab = (1024, 8, 1024, 16, 8192) if on_gpu else (32, 1, 16, 4, 64)
    return dict(
        model=dict(
            type="GPT", num_layers=layers, hidden_size=hidden, num_heads=max(2, hidden // 64), vocab_size=vocab,
            seq_len=tokens,
        ),
        data=dict(type=partial(Windows, tokens, vocab)),
        train=dict(global_batch_size=batch),
    )  # fmt: skip


def of_images(on_gpu: bool) -> dict[str, Any]:
    """A ViT: a batch on a GPU is 77 MB."""
    hidden, layers, side, batch = (384, 12, 224, 128) if on_gpu else (32, 1, 16, 4)
    return dict(
        model=dict(
            type="ViT", num_layers=layers, hidden_size=hidden, num_heads=max(2, hidden // 64),
            image_size=side, patch_size=side // 14 if on_gpu else 4, num_classes=10,
        ),
        data=dict(type=partial(Images, side)),
        train=dict(global_batch_size=batch),
    )  # fmt: skip


def require_shared_memory(config: dict[str, Any], workers: int) -> None:
    """
    Raises:
        LeftOut: a container has too little for what workers have read ahead; they would be killed by SIGBUS.
    """
    there = Path("/dev/shm")
    if workers and there.exists():
        sample = config["data"]["type"]()[0]
        batch = config["train"]["global_batch_size"] * sum(x.nbytes for x in sample.values())
        wanted, free = (READ_AHEAD + 1) * workers * batch, shutil.disk_usage(there).free
        if free < wanted:
            raise LeftOut(f"workers want {wanted / 1e6:.0f} MB of {there}, which has {free / 1e6:.0f} MB free")


def _run(device: torch.device, config: dict[str, Any], workers: int, seconds: float, *, judged: bool) -> Figures:
    require_shared_memory(config, workers)
    options = {
        **config,
        "data": {**config["data"], "num_workers": workers},
        "train": {**config["train"], "precision": "bf16" if _has_bf16(device) else "fp32", "steps": 100_000},
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "device": device.type,
    }
    with undrawn():
        engine = colossus.initialize(options)
    fill(engine.model)
    try:
        batch = next(engine.loader)
        for x in batch.values():
            assert x.device.type == device.type, f"a batch of the loader is on {x.device}"

        def fed() -> object:
            return engine.train_step(next(engine.loader))

        def seconds_fed(calls: int) -> float:
            for _ in range(READ_AHEAD * workers + 1):  # what was read while the other had its turn
                fed()
            return seconds_per_call(fed, device, calls)

        resident = partial(seconds_per_call, lambda: engine.train_step(batch), device)
        series = take_turns({"loader": seconds_fed, "resident": resident}, seconds)
        norm = engine.train_step(batch).grad_norm
        assert math.isfinite(norm), f"after these steps the gradient norm is {norm}"
    finally:
        engine.close()
    over = ratio(series, "loader", "resident")
    figures = {
        "ms": Spread.of(series["loader"]).median * 1e3,
        "ms without a loader": Spread.of(series["resident"]).median * 1e3,
        "time / without": over.median,
        "MB of a batch": sum(x.nbytes for x in batch.values()) / 1e6,
    }
    if judged and over.median > SLOWEST:
        raise AssertionError(f"reading and copying make a step {over.median:.2f} times as long: {figures}")
    return figures


def _has_bf16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
