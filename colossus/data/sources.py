"""Where batches come from: the interface of a source, and the source that reads samples by number (`MapSource`), maybe
in worker processes.

A source gives this data rank's batch of one step after the other, on the CPU. `colossus.data.streams` has the sources
that can only be read from the front.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as torch_collate

from colossus.config.schema import ReadingOptions
from colossus.data.batch import Batch, slice_batch
from colossus.data.sampler import BatchShard, SampleOrder
from colossus.data.tokens import BatchedDataset
from colossus.random import GLOBAL_RNG, derive_seeds


class EndOfData(Exception):
    """There is no next batch: the end of validation data, or of training data that cannot start over."""


class Source(ABC):
    """Batches of this data rank, step after step. ``step`` is the number of the next one."""

    step: int = 0

    @abstractmethod
    def read(self) -> Batch:
        """The next batch; raises `EndOfData` when there is none (never for data that starts over)."""

    @abstractmethod
    def seek(self, step: int) -> None:
        """Make ``step`` the next one to be read."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seek(state["step"])


class MapSource(Source):
    """A dataset with ``__getitem__`` and ``__len__``, read in the order of `SampleOrder` (training) or from first to
    last, of which the last batch may be smaller (validation)."""

    def __init__(self, dataset: Any, shard: BatchShard, options: ReadingOptions) -> None:
        self.dataset = dataset
        self.num_samples = len(dataset)
        self.num_steps = None if shard.endless else -(-self.num_samples // shard.global_batch_size)
        self._shard, self._options = shard, options
        self._by_step = _Batches(dataset, SampleOrder(shard, self.num_samples), options)
        self._workers: Iterator[Batch] | None = None

    def read(self) -> Batch:
        if self.num_steps is not None and self.step >= self.num_steps:
            raise EndOfData
        if self._options.num_workers:
            batch = self._read_from_workers()
        else:
            with GLOBAL_RNG.preserved() if self._by_step.is_seeded else nullcontext():
                batch = self._by_step[self.step]
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        if step != self.step:
            self._workers = None
        self.step = step

    def _read_from_workers(self) -> Batch:
        if self._workers is None:
            steps: Iterable[int] = range(self.step, self.num_steps or 0)
            if self.num_steps is None:
                steps = itertools.count(self.step)
            seed = derive_seeds(self._shard.seed, (self._shard.data_rank, self.step))[0]
            self._workers = _start_workers(self._by_step, steps, self._options, seed)
        workers = self._workers
        try:
            return next(workers)
        except BaseException as error:
            self._workers = None  # they were past this step, which is to be read again
            workers._shutdown_workers()  # type: ignore[attr-defined]
            if str(error).startswith("DataLoader timed out"):
                raise TimeoutError(
                    f"data.num_workers = {self._options.num_workers}: no batch came from a data loader worker in "
                    f"{self._options.worker_timeout:g} s (data.worker_timeout). If no batch takes that long, a worker "
                    f"is locked: it was forked while another thread held a lock (pytorch issue 130610). "
                    f"data.multiprocessing_context='forkserver' starts workers that hold none"
                ) from None
            # without torch's frames, one of which has the error as a local: a reference cycle, see `_Batches`
            raise error.with_traceback(None) from None


class _Batches(Dataset[Any]):
    """The batches of one data rank, by step: what loader workers hold.

    While a sample is read the global generators of torch, `random` and `numpy.random` start from (seed, epoch, index).
    It must not lead back to the source: in a reference cycle workers are left to the garbage collector, which takes 5 s
    to end each.
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
        start, stop = self._order.span(step)
        if start == stop:  # no sample: a batch of one without it, which looks as others do
            return slice_batch(self._read(step, (0, 1)), 0, 0)
        return self._read(step, (start, stop))

    def _read(self, step: int, span: tuple[int, int]) -> Batch:
        indices = self._order.indices(step, span)
        if self._reads_batches:
            return self._dataset.batch(indices)
        if self._seeds_samples:
            samples = []
            for index, seed in zip(indices.tolist(), self._order.seeds(step, span, indices), strict=True):
                GLOBAL_RNG.seed(seed)
                samples += self._fetch([index])
        else:
            samples = self._fetch(indices.tolist())
        if self._seeds_collate:
            GLOBAL_RNG.seed(derive_seeds(self._order.shard.seed, (step, span[0]))[0])
        return self._collate(samples)

    def _fetch(self, indices: list[int]) -> list[Any]:
        fetch_all = getattr(self._dataset, "__getitems__", None)
        if callable(fetch_all):  # torch's own convention for datasets that fetch many at once
            return list(fetch_all(indices))
        return [self._dataset[index] for index in indices]


def _start_workers(batches: _Batches, steps: Iterable[int], options: ReadingOptions, seed: int) -> Iterator[Batch]:
    """The batches of steps; ``seed`` is of what workers draw, as torch derives it."""
    method = options.multiprocessing_context or multiprocessing.get_start_method()
    loader: DataLoader[Any] = DataLoader(
        batches,
        batch_size=None,
        sampler=steps,
        num_workers=options.num_workers,
        collate_fn=_unchanged,
        worker_init_fn=_outlive_stop_signals,
        multiprocessing_context=method,
        timeout=options.worker_timeout,
    )
    # torch draws the workers' base seed from the global generator
    with GLOBAL_RNG.preserved(seed), nullcontext() if method == "fork" else _blocked_sigterm():
        return iter(loader)


def _unchanged(item: Any) -> Any:
    return item


def _outlive_stop_signals(worker: int) -> None:
    """Let a worker end by its rank's SIGTERM only: a batch system tells all processes, but a rank has a step to end."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # on macOS who has sent it cannot be known
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, name="colossus-sigterm", daemon=True).start()


def _end_when_told() -> None:
    rank = multiprocessing.parent_process()  # not the process above where a server has forked this one
    assert rank is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
        pass
    os._exit(0)


@contextmanager
def _blocked_sigterm() -> Iterator[None]:
    """Processes that are started here, with an interpreter of their own, begin with SIGTERM blocked, and so do the
    threads that their imports start: any thread that takes it ends the process."""
    resource_tracker.ensure_running()  # which the first process started needs, and whose start unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
