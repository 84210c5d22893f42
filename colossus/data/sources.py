"""Where batches come from: the interface, and the source that reads samples by number (`MapSource`).

A source gives this data rank's batch of one step after the other, on the CPU. `colossus.data.streams` has the sources
that can only be read from the front.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as torch_collate

from colossus.data.batch import Batch
from colossus.data.passes import EndOfPass
from colossus.data.sampler import sample_indices
from colossus.data.windows import BatchedDataset
from colossus.random import GLOBAL_RNG, derive_seeds


@dataclass(frozen=True)
class BatchShard:
    """The contiguous shard of each global batch that one data rank reads: all that a source knows of the plan.

    Attributes:
        seed: of the order of samples, and of random numbers that a user's data code draws.
        global_batch_size: samples of a batch over all data ranks.
        data_rank: which shard.
        data_size: number of data ranks; divides ``global_batch_size``.
        endless: training starts over at the end of the data, validation ends.
    """

    seed: int
    global_batch_size: int
    data_rank: int
    data_size: int
    endless: bool

    @property
    def size(self) -> int:
        """Samples of this data rank in a batch."""
        return self.global_batch_size // self.data_size

    @property
    def start(self) -> int:
        """The first of them, counted in the global batch."""
        return self.data_rank * self.size

    @property
    def batch_size_name(self) -> str:
        """What messages call ``global_batch_size``."""
        return "train.global_batch_size" if self.endless else "the validation batch size"


class Source(ABC):
    """Batches of this data rank, step after step. ``step`` is the number of the next one."""

    step: int = 0

    @abstractmethod
    def read(self) -> Batch:
        """The next batch; raises `EndOfPass` when there is none (never for data that starts over)."""

    @abstractmethod
    def seek(self, step: int) -> None:
        """Make ``step`` the next one to be read."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seek(state["step"])


class MapSource(Source):
    """A dataset with ``__getitem__`` and ``__len__``, read in the order of `sample_indices` (training) or from first to
    last, whole batches only (validation)."""

    def __init__(
        self,
        dataset: Any,
        shard: BatchShard,
        *,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        num_workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.shard = shard
        self.num_samples = len(dataset)
        self.num_steps = None if shard.endless else self.num_samples // shard.global_batch_size
        self._order = _Order(shard, self.num_samples)
        self._collate = collate_fn or torch_collate
        self._num_workers = num_workers
        self._reads_batches = isinstance(dataset, BatchedDataset) and collate_fn is None and num_workers == 0
        self._batches: Iterator[Batch] | None = None

    def read(self) -> Batch:
        if self.num_steps is not None and self.step >= self.num_steps:
            raise EndOfPass
        if self._reads_batches:
            batch = self.dataset.batch(self._order.indices(self.step))
        elif self._num_workers:
            batch = self._read_from_workers()
        else:
            with GLOBAL_RNG.preserved():
                batch = self._collate(_SeededSamples(self.dataset).__getitems__(self._order.keys(self.step)))
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        if step != self.step:
            self._batches = None
        self.step = step

    def _read_from_workers(self) -> Batch:
        if self._batches is None:
            steps: Iterable[int] = range(self.step, self.num_steps or 0)
            if self.num_steps is None:
                steps = itertools.count(self.step)
            with GLOBAL_RNG.preserved():  # torch draws the workers' base seed from the global generator
                loader = DataLoader(
                    _SeededSamples(self.dataset),
                    batch_sampler=_WorkerKeys(self._order, steps),
                    num_workers=self._num_workers,
                    collate_fn=self._collate,
                )
                self._batches = iter(loader)
        return next(self._batches)


@dataclass(frozen=True)
class _Order:
    """Which samples this data rank reads at a step."""

    shard: BatchShard
    num_samples: int

    def indices(self, step: int) -> np.ndarray:
        shard = self.shard
        if shard.endless:
            return sample_indices(
                shard.seed, step, self.num_samples, shard.global_batch_size, shard.data_rank, shard.data_size
            )
        return step * shard.global_batch_size + shard.start + np.arange(shard.size)

    def keys(self, step: int) -> list[tuple[int, int]]:
        """Number and seed of each sample; the seed depends on the place in the global batch only."""
        start, stop = self.shard.start, self.shard.start + self.shard.size
        seeds = derive_seeds(self.shard.seed, (step,), stop)[start:]
        return [(int(index), seed) for index, seed in zip(self.indices(step), seeds, strict=True)]


@dataclass(frozen=True)
class _WorkerKeys:
    """The batch sampler of loader workers: `_Order.keys` of one step after the other.

    It must not lead back to the source: an iterator with workers that is freed by the garbage collector instead of by
    its count takes its queues apart before it can stop the workers, and then waits 5 s for each.
    """

    order: _Order
    steps: Iterable[int]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return map(self.order.keys, self.steps)


class _SeededSamples(Dataset[Any]):
    """Reads samples with the global generators seeded, so that augmentation depends on the place in the data alone.

    Keys are (index, seed).
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        fetch_all = getattr(self.dataset, "__getitems__", None)
        if callable(fetch_all):  # torch's own convention for datasets that fetch many at once
            GLOBAL_RNG.seed(keys[0][1])
            return fetch_all([index for index, _ in keys])
        return [self[key] for key in keys]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, seed = key
        GLOBAL_RNG.seed(seed)
        return self.dataset[index]
