"""Sources of batches: the interface, and `MapSource`, which reads samples by number, perhaps in worker processes.

A source reads this data rank's batch of one step after the other, on the CPU. The sources of iterables are in
`colossus.data.streams`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data import default_collate as torch_collate

from colossus.config.schema import ReadingOptions
from colossus.data.batch import Batch, Microbatches, SampleDims, slice_batch, to_tensors
from colossus.data.model_input import sequence_length
from colossus.data.padding import with_rows, with_size
from colossus.data.sample_marks import NUM_MARKED, Marks, marks_of, marks_of_batch, repeating
from colossus.data.sampler import BatchShard, IndexArray, SampleOrder
from colossus.data.token_budget import Lengths, lengths_of
from colossus.data.tokens import BatchedDataset
from colossus.data.workers import require_sendable, require_shared_memory, start_workers
from colossus.nest import tensors
from colossus.random import GLOBAL_RNG, derive_seeds

#: a step that stands for the marks of the dataset
_MARKS = -1


class EndOfData(Exception):
    """There is no next batch: the end of validation data, or of training data that cannot start over."""


class Source(ABC):
    """Batches of this data rank, step after step.

    Attributes:
        step: number of the next one.
        shard: the shard of each batch that this data rank reads.
        name: name of the data in messages.
        per_rank: whether each data rank reads samples of its own.
        takes_marks: whether the first samples that are read are marked.
        marks: marks of samples that are the same on all data ranks, unless ``per_rank``; None until they are read.
    """

    step: int = 0
    shard: BatchShard
    name: str
    per_rank: bool = False
    takes_marks: bool = False
    marks: Marks | None = None

    @property
    def wants_marks(self) -> bool:
        return self.takes_marks and self.marks is None

    @abstractmethod
    def read(self) -> Batch:
        """Return the next batch; raise `EndOfData` if there is none (never for data that starts over)."""

    @abstractmethod
    def seek(self, step: int) -> None:
        """Make ``step`` the next one to be read."""

    @abstractmethod
    def close(self) -> None:
        """End worker processes; nothing is read after that."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that were read when the state was saved, whatever the batch size was."""

    @abstractmethod
    def repeating_leaves(self) -> set[str] | None:
        """Read samples twice, and return the leaves that are the same, see `repeating`."""


class MapSource(Source):
    """A dataset with ``__getitem__`` and ``__len__``.

    In training it is read in the order of `SampleOrder`, in validation from first to last, and the last batch may be
    smaller.
    """

    def __init__(self, dataset: Any, shard: BatchShard, options: ReadingOptions) -> None:
        require_sendable({type(dataset).__name__: dataset, "data.collate_fn": options.collate_fn}, options)
        self.dataset, self.name = dataset, type(dataset).__name__
        self.num_samples = len(dataset)
        self.num_steps = None if shard.endless else -(-self.num_samples // shard.global_batch_size)
        self.shard, self._options = shard, options
        if shard.budget is not None:
            self._lengths = lengths_of(dataset, self.name, shard.budget)
        self._by_step = self._batches(shard)
        #: step at which the run was resumed; the batch may have had another size before
        self._first_step = 0
        self._workers: Iterator[Batch] | None = None

    def read(self) -> Batch:
        if self.num_steps is not None and self.step >= self.num_steps:
            raise EndOfData
        if self.wants_marks and not self._options.num_workers:
            self.marks = self._by_step.marks()
        if self._options.num_workers:
            batch = self._read_from_workers()
        else:
            with GLOBAL_RNG.preserved() if self._by_step.is_seeded else nullcontext():
                batch = self._by_step[self.step]
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        if step < self._first_step:
            self._read_by(replace(self.shard, shift=0), 0)
        if step != self.step:
            self._workers = None
        self.step = step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._read_by(self.shard.resumed(state), state["step"])
        self.seek(state["step"])

    def _read_by(self, shard: BatchShard, first_step: int) -> None:
        self._first_step = first_step
        if shard != self.shard:
            self.shard, self._workers = shard, None
            self._by_step = self._batches(shard)

    def _batches(self, shard: BatchShard) -> _Batches:
        order = SampleOrder(shard, self.num_samples, getattr(self.dataset, "samples_at", None))
        if shard.budget is None:
            return _Batches(self.dataset, order, self._options)
        return _BudgetedBatches(self.dataset, order, self._options, self._lengths)

    def close(self) -> None:
        self._workers = None

    def repeating_leaves(self) -> set[str] | None:
        return repeating(self._by_step.marks)

    def _read_from_workers(self) -> Batch:
        begins_with_marks = self._workers is None and self.wants_marks
        if self._workers is None:
            steps: Iterable[int] = range(self.step, self.num_steps or 0)
            if self.num_steps is None:
                steps = itertools.count(self.step)
            if begins_with_marks:  # a worker reads them: the process that forks workers must not open files of the data
                steps = itertools.chain([_MARKS], steps)
            seed = derive_seeds(self.shard.seed, (self.shard.data_rank, self.step))[0]
            self._workers = start_workers(self._by_step, steps, self._options, seed)
        workers = self._workers
        try:
            if begins_with_marks:
                self.marks = next(workers)
            return next(workers)
        except BaseException as error:
            self._workers = None  # they have passed this step, which must be read again
            workers._shutdown_workers()  # type: ignore[attr-defined]
            require_shared_memory(self._options, error)
            if str(error).startswith("DataLoader timed out"):
                raise TimeoutError(
                    f"data.num_workers = {self._options.num_workers}: no batch came from a data loader worker in "
                    f"{self._options.worker_timeout:g} s (data.worker_timeout). If no batch takes that long, a worker "
                    f"is locked: it was forked while another thread held a lock (pytorch issue 130610). "
                    f"data.multiprocessing_context='forkserver' starts workers without locks"
                ) from None
            if str(error).endswith("exited unexpectedly"):
                raise RuntimeError(
                    f"data.num_workers = {self._options.num_workers}: {error}, before it returned a batch: its output "
                    f"says why"
                ) from None
            # without torch's frames, one of which has the error as a local: a reference cycle, see `_Batches`
            raise error.with_traceback(None) from None


class _Batches(Dataset[Any]):
    """The batches of one data rank, by step; loader workers have a copy.

    While a sample is read, the global generators of torch, `random` and `numpy.random` are seeded from (seed, epoch,
    index). It must not reference the source: in a reference cycle workers are left to the garbage collector, which
    takes 5 s to end each.
    """

    def __init__(self, dataset: Any, order: SampleOrder, options: ReadingOptions) -> None:
        self._dataset, self._order = dataset, order
        self._reads_batches = isinstance(dataset, BatchedDataset) and options.collate_fn is None
        self._collate = options.collate_fn or torch_collate
        self._seeds_samples = options.seeds(dataset) and not self._reads_batches
        self._seeds_collate = options.seeds_collate
        #: whether reading a batch seeds the global generators
        self.is_seeded = self._seeds_samples or self._seeds_collate

    def __getitem__(self, step: int) -> Batch:
        if step == _MARKS:
            return self.marks()
        start, stop = self._order.span(step)
        if start == stop:  # no sample: an empty slice of a batch of one, so that shapes and keys are those of others
            return SampleDims(self._order.shard.batch_dims).cut(self._read(step, (0, 1)), 0, 0)
        return self._read(step, (start, stop))

    def marks(self) -> Marks:
        """Return the marks of samples all over the dataset; empty if one of them cannot be read."""
        indices = np.unique(np.linspace(0, self._order.num_samples - 1, NUM_MARKED).astype(np.int64))
        try:
            if self._reads_batches:
                return marks_of_batch(self._dataset.batch(indices))
            with GLOBAL_RNG.preserved():
                return marks_of(self._samples(indices.tolist(), indices.tolist()))
        except Exception:  # training raises it when it reads that sample
            return {}

    def _read(self, step: int, span: tuple[int, int]) -> Batch:
        indices = self._order.indices(step, span)
        if self._reads_batches:
            return self._dataset.batch(indices)
        seeds = self._order.seeds(step, span, indices) if self._seeds_samples else []
        return self._collated(self._samples(indices.tolist(), seeds), step, span[0])

    def _collated(self, samples: list[Any], step: int, first: int) -> Batch:
        if self._seeds_collate:
            GLOBAL_RNG.seed(derive_seeds(self._order.shard.seed, (step, first))[0])
        return self._collate(samples)

    def _samples(self, indices: list[int], seeds: list[int]) -> list[Any]:
        if not self._seeds_samples:
            return self._fetch(indices)
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            GLOBAL_RNG.seed(seed)
            samples += self._fetch([index])
        return samples

    def _fetch(self, indices: list[int]) -> list[Any]:
        fetch_all = getattr(self._dataset, "__getitems__", None)
        if callable(fetch_all):  # torch's own convention for datasets that fetch many at once
            return list(fetch_all(indices))
        return [self._dataset[index] for index in indices]


class _BudgetedBatches(_Batches):
    """The batches of one data rank in microbatches of a budget of tokens, each padded to its longest sample."""

    def __init__(self, dataset: Any, order: SampleOrder, options: ReadingOptions, lengths: Lengths) -> None:
        super().__init__(dataset, order, options)
        assert order.shard.budget is not None
        self._lengths, self._budget, self._pads = lengths, order.shard.budget, options.collate_fn is None

    def __getitem__(self, step: int) -> Any:
        if step == _MARKS:
            return self.marks()
        shard, whole = self._order.shard, (0, self._order.size(step))
        indices = self._order.indices(step, whole)
        seeds = np.array(self._order.seeds(step, whole, indices) if self._seeds_samples else [0] * len(indices))
        parts = self._budget.cut(self._lengths[indices], shard.data_size)[shard.data_rank]
        batches, numbers = [], []
        for places in parts:
            batch = self._microbatch(step, places if len(places) else np.zeros(1, np.int64), indices, seeds)
            rows, tokens = self._budget.shape(self._lengths[indices[places]])
            if not len(places):  # rows of padding, of the shapes and keys of a sample
                batch = slice_batch(with_size(batch, sequence_length(batch), tokens, 1), 0, 0)
            batches.append(with_rows(batch, rows))
            numbers.append(torch.full((rows,), -1))
            numbers[-1][: len(places)] = torch.from_numpy(places)
        return Microbatches(tuple(batches), tuple(numbers))

    def _microbatch(self, step: int, places: IndexArray, indices: IndexArray, seeds: np.ndarray) -> Batch:
        """Return the samples at these places of the global batch, as long as the longest of them, padded."""
        samples, lengths = indices[places], self._lengths[indices[places]]
        _, tokens = self._budget.shape(lengths)
        if self._reads_batches:
            batch = self._dataset.batch(samples)
            return with_size(batch, sequence_length(batch), tokens, 1)
        read = [to_tensors(sample) for sample in self._samples(samples.tolist(), seeds[places].tolist())]
        if self._pads:
            triples = [*zip(read, samples.tolist(), lengths.tolist(), strict=True)]
            # a tensor without the length of one sample has that of another by chance (8 features, 8 tokens)
            fixed = {
                path for sample, _, length in triples for path, x in tensors(sample) if x.dim() and len(x) != length
            }
            return self._collated([self._padded(*triple, tokens, fixed) for triple in triples], step, int(places[0]))
        batch = self._collated(read, step, int(places[0]))
        if (length := sequence_length(batch)) > tokens:
            raise ValueError(
                f"data.collate_fn makes {length} tokens of samples whose longest has {int(lengths.max())} by "
                f"{type(self._dataset).__name__}.lengths ({tokens} with padding): pad to the longest sample alone"
            )
        return with_size(batch, length, tokens, 1)

    def _padded(self, sample: Any, number: int, length: int, tokens: int, fixed: set[str]) -> Any:
        shapes = [(path, list(x.shape)) for path, x in tensors(sample)]
        if not any(shape and shape[0] == length for _, shape in shapes):
            raise ValueError(
                f"sample {number} has {length} tokens by {type(self._dataset).__name__}.lengths, but no tensor with as "
                f"many in dim 0: {', '.join(f'{path} {shape}' for path, shape in shapes)}"
            )
        return with_size(sample, length, tokens, 0, fixed)
