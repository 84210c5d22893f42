"""A source of ready batches: a DataLoader, or any other iterable of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from colossus.config.schema import ReadingOptions
from colossus.data.batch import Batch, SampleDims, batch_size_of
from colossus.data.sample_marks import NUM_MARKED, Marks, marks_of_batch
from colossus.data.sampler import BatchShard
from colossus.data.sources import EndOfData
from colossus.data.streams import StreamSource


class BatchStream(StreamSource):
    """Ready batches of a DataLoader or any other iterable.

    They have ``global_batch_size`` samples, of which each data rank takes its slice; with ``per_rank`` they are those
    of this data rank. A shorter batch at the end of a pass, or of each worker's part of an IterableDataset, is dropped
    in training, as with ``drop_last=True``, and used in validation. Anywhere else it is an error.

    Raises:
        ValueError: if the batch size or the DistributedSampler of a DataLoader does not fit these data ranks.
    """

    def __init__(self, batches: Any, shard: BatchShard, options: ReadingOptions) -> None:
        stateful = batches
        sampler = None
        if isinstance(batches, DataLoader):
            sampler = getattr(batches.batch_sampler, "sampler", batches.sampler)
            if isinstance(batches.dataset, IterableDataset) and not batches.num_workers:
                # with workers the dataset that advances is a copy in another process
                stateful = batches if hasattr(batches, "state_dict") else batches.dataset
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (shard.data_size, shard.data_rank):
                raise ValueError(
                    f"the DataLoader's DistributedSampler has num_replicas={sampler.num_replicas}, "
                    f"rank={sampler.rank}, but this process is data rank {shard.data_rank} of {shard.data_size}; ranks "
                    f"of one model must read the same samples: DistributedSampler(dataset, "
                    f"num_replicas={shard.data_size}, rank={shard.data_rank}), or no DistributedSampler and "
                    f"batch_size={shard.global_batch_size}"
                )
            options = options.model_copy(update={"per_rank": True})
        super().__init__(batches, shard, options, stateful=stateful, gives_batches=True)
        #: number of batches of a pass that may be short, that were, and that were without a whole one between them
        self._most_short, self._num_short, self._short_in_a_row = 1, 0, 0
        if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
            self._most_short = max(1, batches.num_workers)
        size = getattr(batches, "batch_size", None)
        if isinstance(batches, DataLoader) and size not in (None, self._whole):
            raise ValueError(self._wrong_size(size))

    def _read(self) -> Batch:
        endless = self.shard.endless
        while True:
            batches, _ = self._take(1, range(1), wrap=endless)
            if not batches:
                raise EndOfData
            dims = SampleDims(self.shard.batch_dims)
            size = batch_size_of(first := dims.first(batches[0]))
            if self.wants_marks:
                self.marks = marks_of_batch(first)
            if self._offset == 1:
                self._num_short = 0
            if size != self._whole:
                self._require_last(size)
            else:
                self._short_in_a_row = 0
            if size == self._whole or not endless:
                return batches[0] if self.per_rank else dims.cut(batches[0], *self._span(size))

    def _read_anew(self) -> Callable[[], Marks]:
        """Return what reads the first batch.

        Of a DataLoader it reads samples of the dataset, without the workers, whose generators would be the same each
        time, and without the sampler, which may keep a place.
        """
        first = SampleDims(self.shard.batch_dims).first
        if not isinstance(loader := self._iterable, DataLoader):
            batches = deepcopy(self._iterable)
            return lambda: marks_of_batch(first(next(iter(batches))))
        is_stream = isinstance(loader.dataset, IterableDataset)
        dataset: Any = deepcopy(loader.dataset) if is_stream else loader.dataset

        def read() -> Marks:
            items = iter(dataset) if is_stream else map(dataset.__getitem__, range(len(dataset)))
            is_batch = loader.batch_sampler is None
            return marks_of_batch(first(loader.collate_fn(next(items) if is_batch else [*islice(items, NUM_MARKED)])))

        return read

    def _require_last(self, size: int) -> None:
        """Raise ValueError for a batch that is not whole, unless it ends a pass or a worker's part of one.

        In training, whole batches must come between such batches.
        """
        self._num_short, self._short_in_a_row = self._num_short + 1, self._short_in_a_row + 1
        is_only = self.shard.endless and self._short_in_a_row == 2 * self._most_short
        ends_pass = self._num_short == self._most_short
        if size > self._whole or is_only or (ends_pass and self._take(1, range(0), wrap=False)[1]):
            raise ValueError(self._wrong_size(size))

    def _go_to(self, step: int, epoch: int, reads: list[list[int]], user_state: list[Any]) -> None:
        super()._go_to(step, epoch, reads, user_state)
        self._num_short = self._short_in_a_row = 0

    def _wrong_size(self, size: int) -> str:
        shard, whole = self.shard, self.shard.global_batch_size
        gives = f"{self.name} gives batches of {size} samples, but {shard.batch_size_name} = {whole}"
        if shard.data_size == 1:
            return f"{gives}: set one of them to the other"
        return (
            f"{gives} over {shard.data_size} data ranks. Give batches of {whole} that are the same on all ranks (each "
            f"data rank takes its {shard.size}), or batches of {shard.size} that differ between data ranks, by a "
            f"DistributedSampler or with data = dict(type=lambda: loader, per_rank=True)"
        )
