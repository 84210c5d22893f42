"""Batches of the loader on the device: those of the dataset, read by workers or not, and no wait where they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.training import config_of
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import colossus
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


def make_engine(device: torch.device, kind: str, workers: int) -> Engine:
    config = config_of({}, 200, "fp32", model=SIZES, device=device.type)
    config["data"] = dict(type=DATA[kind], num_workers=workers)
    return colossus.initialize(config)


@pytest.mark.parametrize(("kind", "workers"), [("dataset", 0), ("dataset", 2), ("iterable dataset", 0)])
def test_batches_are_those_of_the_cpu(ranks: DeviceRanks, host_ranks: DeviceRanks, kind: str, workers: int) -> None:
    mine, expected = ranks.run_one(read, kind, workers), host_ranks.run_one(read, kind, 0)
    for step, (batch, other) in enumerate(zip(mine, expected, strict=True)):
        assert batch == other, f"batch {step} is {batch}, not {other}"


def read(rank: int, device: torch.device, kind: str, workers: int) -> list[dict[str, list[Any]]]:
    """Read batches, and look at each only when later ones have been read: none may be written over."""
    engine = make_engine(device, kind, workers)
    batches = [next(engine.loader) for _ in range(BATCHES)]
    for step, batch in enumerate(batches):
        for key, value in batch.items():
            assert value.device.type == device.type, f"{key} of batch {step} is on {value.device}"
    numbers = [{key: value.tolist() for key, value in batch.items()} for batch in batches]
    engine.close()
    return numbers


@pytest.mark.parametrize("kind", DATA)
def test_steps_with_their_batches_wait_for_nothing(cuda: torch.device, ranks: DeviceRanks, kind: str) -> None:
    ranks.run_one(step_without_waits, kind)


def step_without_waits(rank: int, device: torch.device, kind: str) -> None:
    engine = make_engine(device, kind, 0)
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
