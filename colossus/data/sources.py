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

from colossus.data.batch import Batch
from colossus.data.passes import EndOfPass
from colossus.data.sampler import sample_indices
from colossus.data.seeded import SeededBatches, ShardCollate, item_seed, of_span
from colossus.data.windows import BatchedDataset
from colossus.data.worker_loader import WorkerLoader, end_workers
from colossus.random import GLOBAL_RNG


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

    def span(self, size: int) -> tuple[int, int]:
        """From and up to which sample this data rank has a global batch of this size, which may be a smaller last one.

        Then data ranks may have one sample more or less than others, or none.
        """
        return size * self.data_rank // self.data_size, size * (self.data_rank + 1) // self.data_size

    @property
    def batch_size_name(self) -> str:
        """What messages call ``global_batch_size``."""
        return "train.global_batch_size" if self.endless else "the validation batch size (train.eval_batch_size)"


class Source(ABC):
    """Batches of this data rank, step after step. ``step`` is the number of the next one."""

    step: int = 0
    #: what the config says; None where it says nothing
    read_ahead: bool | None = None

    @property
    def may_be_read_ahead(self) -> bool:
        """Whether one batch more than was taken may be read unasked."""
        return self._depends_on_place_only() if self.read_ahead is None else self.read_ahead

    def _depends_on_place_only(self) -> bool:
        return True

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
    last, of which the last batch may be smaller (validation)."""

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
        self.num_steps = None if shard.endless else -(-self.num_samples // shard.global_batch_size)
        self._order = _Order(shard, self.num_samples)
        collate = ShardCollate(collate_fn, is_shard=shard.data_size > 1)
        self._by_step = SeededBatches(dataset, self._order, collate, shard.seed)
        self._num_workers = num_workers
        self._reads_batches = isinstance(dataset, BatchedDataset) and collate_fn is None and num_workers == 0
        self._batches: Iterator[Batch] | None = None

    def read(self) -> Batch:
        if self.num_steps is not None and self.step >= self.num_steps:
            raise EndOfPass
        if self._reads_batches:
            batch = of_span(
                lambda start, stop: self.dataset.batch(self._order(self.step, start, stop)),
                *self._order.span(self.step),
            )
        elif self._num_workers:
            batch = self._read_from_workers()
        else:
            with GLOBAL_RNG.preserved():
                batch = self._by_step[self.step]
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
            # torch draws the seed that get_worker_info() tells from the global generator
            with GLOBAL_RNG.preserved(item_seed(self.shard.seed, 0, 0)):
                self._batches = iter(WorkerLoader(self._by_step, self._num_workers, steps))
        try:
            return next(self._batches)
        except BaseException:  # the workers are past this step; who reads again gets this one
            end_workers(self._batches)
            self._batches = None
            raise


@dataclass(frozen=True)
class _Order:
    """Which samples make up a batch."""

    shard: BatchShard
    num_samples: int

    def size(self, step: int) -> int:
        """Samples of the global batch of a step."""
        whole = self.shard.global_batch_size
        return whole if self.shard.endless else min(whole, self.num_samples - step * whole)

    def span(self, step: int) -> tuple[int, int]:
        """From and up to which place of it this data rank's samples are."""
        return self.shard.span(self.size(step))

    def __call__(self, step: int, start: int, stop: int) -> np.ndarray:
        """Those from place ``start`` to ``stop`` of the global batch of a step."""
        shard = self.shard
        if not shard.endless:
            return step * shard.global_batch_size + np.arange(start, stop)
        if (start, stop) == (0, shard.global_batch_size):
            return sample_indices(shard.seed, step, self.num_samples, shard.global_batch_size)
        assert (start, stop) == (shard.start, shard.start + shard.size)
        return sample_indices(
            shard.seed, step, self.num_samples, shard.global_batch_size, shard.data_rank, shard.data_size
        )
