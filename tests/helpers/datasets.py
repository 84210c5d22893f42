"""Data of every kind that a user may bring, and loaders of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from colossus.data import Loaders, build_loaders

BATCH = 8
SAMPLES = 29  # odd on purpose: batches straddle passes


def loaders(data: Any, rank: int = 0, size: int = 1, **options: Any) -> Loaders:
    return build_loaders(
        data, **{"seed": 3, "global_batch_size": BATCH, "data_rank": rank, "data_size": size, **options}
    )


def ids(batch: Any) -> list[int]:
    """The sample numbers, which all data here carries as ``x``."""
    return [int(value) for value in batch["x"]]


class Numbers(Dataset[Any]):
    """Sample ``i`` is ``i`` and one draw from each global generator."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert type(index) is int
        if not 0 <= index < self.count:
            raise IndexError
        return {"x": torch.tensor(index), "noise": [torch.rand(()), random.random(), np.random.rand()]}


class Stream(IterableDataset[Any]):
    """0, 1, ... in each pass, the numbers of pass ``e`` 1000 e higher."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield {"x": torch.tensor(index + 1000 * self.epoch)}


class Remembering(Stream):
    """A stream that saves its place itself; ``served`` tells how much it has read."""

    def __init__(self, count: int = SAMPLES) -> None:
        super().__init__(count)
        self.place = 0
        self.served = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.count:
            self.place += 1
            self.served += 1
            yield {"x": torch.tensor(self.place - 1)}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Batches:
    """An iterable of ready batches of ``size``."""

    def __init__(self, size: int = BATCH, count: int = 5) -> None:
        self.size, self.count = size, count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield {"x": np.arange(self.size) + number * self.size}


def shuffled(size: int = BATCH, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=size, shuffle=True, num_workers=workers)


KINDS: dict[str, Callable[[], Any]] = {
    "map": Numbers,
    "list": lambda: [{"x": torch.tensor(i)} for i in range(SAMPLES)],
    "stdlib": lambda: {"type": "PythonStdlib", "seq_len": 16, "max_bytes": 8000},
    "stream": Stream,
    "remembering": Remembering,
    "loader": shuffled,
    "loader of stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "loader of remembering": lambda: DataLoader(Remembering(), batch_size=BATCH),
    "batches": Batches,
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(torch.equal(left, right))


def joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], list):
        return [joined(list(values)) for values in zip(*parts, strict=True)]
    return torch.cat(parts)
