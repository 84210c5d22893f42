"""Batches on the device: those of the CPU, read by workers or not, and no wait where they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from helpers.training import config_of
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import colossus
from benchmarks.gpu.section import Case, Figures, LeftOut
from colossus.engine.engine import Engine

SIZES: dict[str, Any] = dict(num_layers=1, hidden_size=32, num_heads=2, vocab_size=53, seq_len=16)
COUNT, BATCHES = 96, 30


class Windows(Dataset[Any]):
    """Sample i is its own sequence of tokens."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(SIZES["seq_len"] + 1) * (index + 1) + index) % SIZES["vocab_size"]
        return {"inputs": ids[:-1], "labels": ids[1:]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Windows()[index] for index in range(COUNT))


DATA: dict[str, Any] = {"dataset": Windows, "iterable dataset": Stream}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    for kind, workers in (("dataset", 0), ("dataset", 2), ("iterable dataset", 0)):
        yield Case(f"{kind}, {workers} workers: the CPU's batches", partial(_same, device, kind, workers))
    for kind in DATA:
        yield Case(f"{kind}: steps with their batches wait for nothing", partial(_waits, device, kind))


def _engine(device: torch.device, kind: str, workers: int) -> Engine:
    config = config_of({}, 200, "fp32", model=SIZES, device=device.type)
    config["data"] = dict(type=DATA[kind], num_workers=workers)
    return colossus.initialize(config)


def _same(device: torch.device, kind: str, workers: int) -> Figures:
    """Every batch is looked at only when later ones have been read: none is written over."""
    mine, host = _engine(device, kind, workers), _engine(torch.device("cpu"), kind, 0)
    found = [next(mine.loader) for _ in range(BATCHES)]
    wanted = [next(host.loader) for _ in range(BATCHES)]
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for key, value in other.items():
            assert one[key].device.type == device.type, f"{key} of batch {step} is on {one[key].device}"
            assert torch.equal(one[key].cpu(), value), f"{key} of batch {step} is {one[key].tolist()}, not {value}"
    mine.close()
    host.close()
    return {"batches": BATCHES}


def _waits(device: torch.device, kind: str) -> Figures:
    if device.type != "cuda":
        raise LeftOut("no CUDA device")
    engine = _engine(device, kind, 0)
    for _ in range(4):
        engine.train_step(next(engine.loader))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            engine.train_step(next(engine.loader))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()
    return {"steps": 4}
