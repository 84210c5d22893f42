"""An IterableDataset read by one worker process, which collates whole batches there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from colossus.data.batch import Batch
from colossus.data.passes import EndOfPass, Passes
from colossus.data.seeded import CollateFn, item_seed
from colossus.data.sources import BatchShard
from colossus.data.streams import CollatedStream, SampleStream
from colossus.data.worker_loader import WorkerLoader
from colossus.random import GLOBAL_RNG


class _Piece(NamedTuple):
    """What a worker sends: the batch of this data rank, or samples of a batch that two passes share.

    Attributes:
        size: samples of the data that it took.
        batch: None where these are samples.
        samples: with None for what other data ranks collate.
    """

    size: int
    batch: Batch | None
    samples: list[Any]


class _PassInWorker(IterableDataset[_Piece]):
    """One pass over a dataset. What it is to do is said by its attributes, before the worker is started.

    Attributes:
        epoch: number of the pass.
        skipped: its samples that were read before.
        begun: samples of the first batch that are there already, from the pass before.
        step: number of the first batch.
    """

    def __init__(self, dataset: IterableDataset[Any], shard: BatchShard, collate_fn: CollateFn | None) -> None:
        self._dataset, self._shard, self._collate_fn = dataset, shard, collate_fn
        self.epoch = self.skipped = self.begun = self.step = 0

    def __iter__(self) -> Iterator[_Piece]:
        reader = SampleStream(self._dataset, self._shard, collate_fn=self._collate_fn)
        passes, whole = reader.passes, self._shard.global_batch_size
        passes.epoch, reader.step = self.epoch, self.step
        try:
            passes.skip(self.skipped)
        except EndOfPass:
            raise ValueError(
                f"{passes.name} has less than {self.skipped} samples in pass {self.epoch}, but the run that goes on "
                f"had read so many: the data is not the same any more"
            ) from None
        if self.begun:
            samples = reader.samples(self.begun, whole, wrap=False)
            yield _Piece(len(samples), None, samples)
            if len(samples) < whole - self.begun:
                return
            reader.step += 1
        while len(samples := reader.samples(0, whole, wrap=False)) == whole:
            yield _Piece(whole, reader.collated(samples), [])
            reader.step += 1
        if samples:
            yield _Piece(len(samples), None, samples)


class _WorkerPasses(Passes):
    """`_Piece`s of one pass after the other. ``offset`` counts samples."""

    def __init__(self, data: _PassInWorker, seed: int, *, name: str) -> None:
        super().__init__(WorkerLoader(data, 1), seed, name=name)
        self.data = data

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (self.epoch, self.offset) != (0, 0):
            self.rewind()
        self.epoch, self.data.skipped = state["epoch"], state["offset"]
        if state["offset"]:
            self._tell_reading_again(state)
            with GLOBAL_RNG.preserved(item_seed(self._seed, self.epoch, 0)):
                self._begin()
        self.offset, self.data.skipped = state["offset"], 0

    def _set_epoch(self) -> None:
        self.data.epoch = self.epoch

    def _length(self, item: _Piece) -> int:
        return item.size


class WorkerSampleStream(CollatedStream):
    """An IterableDataset that a worker reads and collates, ahead of the step that needs it."""

    def __init__(
        self, dataset: IterableDataset[Any], shard: BatchShard, *, collate_fn: CollateFn | None = None
    ) -> None:
        data = _PassInWorker(dataset, shard, collate_fn)
        self._pieces = _WorkerPasses(data, shard.seed, name=type(dataset).__name__)
        super().__init__(self._pieces, shard, collate_fn)

    def read(self) -> Batch:
        if self._is_over:
            raise EndOfPass
        samples: list[Any] = []
        while len(samples) < self.shard.global_batch_size:
            self._pieces.data.begun, self._pieces.data.step = len(samples), self.step
            try:
                piece: _Piece = self._pieces.read(wrap=self.shard.endless)
            except EndOfPass:
                self._is_over = True
                break
            if piece.batch is not None:
                assert not samples, "a pass begins with what the batch lacks"
                self.step += 1
                return piece.batch
            samples += piece.samples
        if not samples:
            raise EndOfPass
        with GLOBAL_RNG.preserved():
            batch = self.collated(samples)
        self.step += 1
        return batch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pieces.data.begun, self._pieces.data.step = 0, state["step"]
        super().load_state_dict(state)


def sample_stream(
    dataset: IterableDataset[Any],
    shard: BatchShard,
    *,
    collate_fn: CollateFn | None = None,
    num_workers: int = 0,
) -> CollatedStream:
    """The source that reads an IterableDataset.

    Raises:
        ValueError: for more than one worker.
    """
    if num_workers > 1:
        name = type(dataset).__name__
        raise ValueError(
            f"data.num_workers = {num_workers}, but {name} is an IterableDataset: each worker would read the whole "
            f"of it, and every sample would come {num_workers} times. num_workers=1 reads it ahead in one process; "
            f"for more, give a DataLoader of your own around a dataset that shares its samples out by "
            f"torch.utils.data.get_worker_info()"
        )
    kind = WorkerSampleStream if num_workers else SampleStream
    return kind(dataset, shard, collate_fn=collate_fn)
