"""Sources that are read from the front: an iterable of samples (`SampleStream`) or of ready batches (`BatchStream`).

Every rank reads the same stream and keeps its shard of each batch, except where data is per data rank already.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import default_collate as torch_collate

from colossus.data.batch import Batch, batch_size_of, slice_batch
from colossus.data.passes import ONE_PASS, Passes
from colossus.data.sampler import BatchShard
from colossus.data.sources import EndOfData, ReadingOptions, Source, read_next, start_workers
from colossus.random import GLOBAL_RNG, derive_seeds

log = logging.getLogger("colossus.data")


class StreamSource(Source):
    """What `SampleStream` and `BatchStream` share: they reach a step by reading up to it.

    Args:
        stateful: what may have a ``state_dict``.
        chunk: items of the iterable that a batch takes; by default its samples.
    """

    def __init__(
        self, iterable: Any, shard: BatchShard, options: ReadingOptions, *, stateful: Any, chunk: int | None = None
    ) -> None:
        has_state = all(callable(getattr(stateful, name, None)) for name in ("state_dict", "load_state_dict"))
        self.shard, self.per_rank = shard, options.per_rank
        #: samples of a whole batch
        self._whole = shard.size if options.per_rank else shard.global_batch_size
        stateful, seeds_items = stateful if has_state else None, options.seeds(iterable)
        self.passes = Passes(iterable, shard.seed, chunk or self._whole, stateful, seeds_items=seeds_items)
        if self.passes.is_one_pass and not shard.endless:
            raise ValueError(f"data.validation: {self.passes.name} {ONE_PASS}, because every evaluation reads it anew")
        # a state of the user's own would have to be taken before each batch, and may be costly
        self.may_be_read_ahead = not has_state
        #: a pass of validation has ended with a batch that is not whole
        self._is_over = False
        self._has_failed = False

    def _span(self, size: int) -> tuple[int, int]:
        """From and up to which sample of a batch of this size this data rank takes."""
        return (0, size) if self.per_rank else self.shard.span(size)

    def read(self) -> Batch:
        if self._is_over:
            raise EndOfData
        if self._has_failed:
            raise RuntimeError(f"{self.passes.name} has raised an error before: what it gives next is not known")
        try:
            batch = self._read()
        except EndOfData:
            raise
        except BaseException:
            self._has_failed = True
            raise
        self.step += 1
        return batch

    @abstractmethod
    def _read(self) -> Batch:
        """The next batch, or `EndOfData`."""

    def seek(self, step: int) -> None:
        if step < self.step or not step:  # a first step may have failed, and taken items
            self.passes.rewind()
            self.step, self._is_over, self._has_failed = 0, False, False
        if step > self.step:
            log.warning("%s cannot seek: reading %d batches to reach step %d", self.passes.name, step - self.step, step)
        while self.step < step:
            self.read()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "passes": self.passes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "passes" not in state:  # saved when the data was of another kind
            self.seek(state["step"])
            return
        self.passes.load_state_dict(state["passes"])
        self.step, self._is_over, self._has_failed = state["step"], False, False


class SampleStream(StreamSource):
    """An IterableDataset: each step takes ``global_batch_size`` samples, and collates those of this data rank. With
    ``per_rank`` the dataset gives the samples of this data rank alone, and a step takes that many.

    A batch that the end of a pass leaves incomplete is filled from the next pass. Where there is no next one it is
    dropped in training, and the last one in validation.
    """

    def __init__(self, dataset: IterableDataset[Any], shard: BatchShard, options: ReadingOptions) -> None:
        super().__init__(dataset, shard, options, stateful=dataset)
        self._collate = options.collate_fn or torch_collate
        self._seeds_collate = options.seeds_collate

    def _read(self) -> Batch:
        whole, endless = self._whole, self.shard.endless
        start, stop = self._span(whole)
        samples, size = self.passes.take(whole, range(start, stop) if endless else range(whole), wrap=endless)
        if not size or (endless and size < whole):
            raise EndOfData
        if not endless:
            self._is_over = size < whole
            start, stop = self._span(size)
            if start == stop:  # no sample: a batch of one without it, which looks as others do
                return slice_batch(self._collated(samples[:1], start), 0, 0)
            samples = samples[start:stop]
        return self._collated(samples, start)

    def _collated(self, samples: list[Any], start: int) -> Batch:
        if not self._seeds_collate:
            return self._collate(samples)
        with GLOBAL_RNG.preserved(derive_seeds(self.shard.seed, (self.step, start))[0]):
            return self._collate(samples)


class WorkerStream(Source):
    """A stream that one worker process reads and collates, ahead of the step that needs it. Going elsewhere takes
    another worker.

    Args:
        stream: which is not read here.
    """

    def __init__(self, stream: SampleStream, options: ReadingOptions) -> None:
        self.passes = stream.passes
        self._stream, self._options = stream, options
        self._worker: Iterator[Any] | None = None
        #: the stream's state behind the last batch that was taken; None: it begins
        self._state: dict[str, Any] | None = None
        self._is_over = False

    def read(self) -> Batch:
        if self._is_over:
            raise EndOfData
        if self._worker is None:
            seed = derive_seeds(self._stream.shard.seed, (self.step,))[0]
            self._worker = start_workers(_FromState(self._stream, self._state), self._options, seed)
        try:
            batch, self._state = read_next(self._worker, self._options)
        except StopIteration:
            self._is_over = True
            raise EndOfData from None
        except BaseException:
            self._worker = None
            raise
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        if step < self.step or not step:
            self._go_to(0, None)
        while self.step < step:
            self.read()

    def _go_to(self, step: int, state: dict[str, Any] | None) -> None:
        self.step, self._state, self._worker, self._is_over = step, state, None, False

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "passes" not in state:  # saved when the data was of another kind
            self.seek(state["step"])
        else:
            self._go_to(state["step"], state)


class _FromState(IterableDataset[Any]):
    """The batches of a stream from a state on, each with the state behind it. Iterated once, in a worker."""

    def __init__(self, stream: SampleStream, state: dict[str, Any] | None) -> None:
        self._stream, self._state = stream, state

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        if self._state is not None:
            self._stream.load_state_dict(self._state)
        while True:
            try:
                yield self._stream.read(), self._stream.state_dict()
            except EndOfData:
                return


class BatchStream(StreamSource):
    """Ready batches, of a DataLoader or any other iterable. They hold ``global_batch_size`` samples, of which each data
    rank takes its slice; with ``per_rank`` they are those of this data rank.

    A shorter batch at the end of a pass is dropped in training (as ``drop_last=True`` does), and taken in validation;
    anywhere else it is an error.

    Raises:
        ValueError: a DataLoader whose batch size or DistributedSampler is not for these data ranks.
    """

    def __init__(self, batches: Any, shard: BatchShard, options: ReadingOptions) -> None:
        stateful = batches
        sampler = None
        if isinstance(batches, DataLoader):
            sampler = getattr(batches.batch_sampler, "sampler", batches.sampler)
            if isinstance(batches.dataset, IterableDataset) and not batches.num_workers:
                # with workers the dataset that moves on is a copy in another process
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
            options = replace(options, per_rank=True)
        super().__init__(batches, shard, options, stateful=stateful, chunk=1)
        # a generator of batches may make them from what the model has learnt so far
        self.may_be_read_ahead &= isinstance(batches, DataLoader)
        size = getattr(batches, "batch_size", None)
        if isinstance(batches, DataLoader) and size not in (None, self._whole):
            raise ValueError(self._wrong_size(size))
        self._logged_short_batch = False

    def _read(self) -> Batch:
        endless = self.shard.endless
        while True:
            batches, _ = self.passes.take(1, range(1), wrap=endless)
            if not batches:
                raise EndOfData
            size = batch_size_of(batches[0])
            if size != self._whole:
                self._require_last(size)
            if size == self._whole or not endless:
                self._is_over = size != self._whole
                return batches[0] if self.per_rank else slice_batch(batches[0], *self._span(size))

    def _require_last(self, size: int) -> None:
        """A batch that is not whole is right as the last one of a pass only, and in training not as its only one."""
        is_only = self.shard.endless and self.passes.offset == 1
        if size > self._whole or is_only or self.passes.take(1, range(0), wrap=False)[1]:
            raise ValueError(self._wrong_size(size))
        if self.shard.endless and not self._logged_short_batch:
            log.info("%s: the last batch of a pass has %d samples and is dropped", self.passes.name, size)
            self._logged_short_batch = True

    def _wrong_size(self, size: int) -> str:
        shard, whole = self.shard, self.shard.global_batch_size
        gives = f"{self.passes.name} gives batches of {size} samples, but {shard.batch_size_name} = {whole}"
        if shard.data_size == 1:
            return f"{gives}: set one of them to the other"
        return (
            f"{gives} over {shard.data_size} data ranks. Give batches of {whole} that are the same on all ranks (each "
            f"data rank takes its {whole} / {shard.data_size} = {shard.size}), or batches of {shard.size} that differ "
            f"between data ranks: by DistributedSampler(dataset, num_replicas={shard.data_size}, "
            f"rank={shard.data_rank}), or by other means and data = dict(type=lambda: loader, per_rank=True)"
        )
