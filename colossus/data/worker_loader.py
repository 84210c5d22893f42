"""torch's DataLoader whose workers are seen to start.

A worker is forked from a rank that has other threads (gloo's, say). A lock that one of them holds at that moment, of
the C library or of a C++ static, stays locked in the worker for good: as it starts, ``torch.set_num_threads`` registers
a destructor, which takes such a lock (pytorch/pytorch#130610). A worker that waits for one never answers, so it is
ended and started again. Workers that are not forked (``spawn``, ``forkserver``) begin without locks.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from colossus.context.local_ranks import StallDetector
from colossus.data.seeded import unchanged
from colossus.data.worker_signals import blocked_sigterm, outlive_stop_signals

log = logging.getLogger("colossus.data")

#: seconds in which a worker that has not started yet computes nothing, after which it is taken for locked
STALL_SECONDS = 5.0
_END_SECONDS = 1.0
_MOST_STARTS = 5


class WorkerLoader(DataLoader[Any]):
    """What a dataset gives, one item after the other, uncollated, read ahead by ``num_workers`` processes.

    Args:
        sampler: keys of the items, for a dataset that has ``__getitem__``.
    """

    def __init__(self, dataset: Any, num_workers: int, sampler: Iterable[Any] | None = None) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=unchanged,
            worker_init_fn=outlive_stop_signals,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """
        Raises:
            RuntimeError: when workers did not start, each time again.
        """
        if multiprocessing.get_start_method() != "fork":
            with blocked_sigterm():
                return super().__iter__()
        started = mmap.mmap(-1, self.num_workers)  # a byte for each worker, in memory that they share
        self.worker_init_fn = partial(_on_start, started)
        for _ in range(_MOST_STARTS):
            started[:] = bytes(self.num_workers)
            workers = super().__iter__()
            stuck = _stuck_workers(workers, started)
            if not stuck:
                return workers
            log.warning(
                "%d of %d data loader workers did not start: they were forked while another thread held a lock; they "
                "are ended and started again", len(stuck), self.num_workers,
            )  # fmt: skip
            _end(workers, stuck)
        raise RuntimeError(
            f"data.num_workers = {self.num_workers}: a data loader worker was locked as it started, {_MOST_STARTS} "
            f"times: a thread of this process holds a lock of the C library nearly all the time; take num_workers=0"
        )


def end_workers(workers: Any) -> None:
    """End those of a loader's iterator now: one that an error has ended is in a cycle with its traceback, and so would
    meet the garbage collector, maybe in a worker that was forked since."""
    workers._shutdown_workers()


def _stuck_workers(workers: Any, started: mmap.mmap) -> list[Any]:
    """Those that wait for a lock, once all others have started."""
    stall = StallDetector([each.pid for each in workers._workers], STALL_SECONDS)
    while waiting := [each for number, each in enumerate(workers._workers) if not started[number]]:
        if any(not each.is_alive() for each in waiting):
            break  # it has died, which the next read says in torch's words
        if stall.is_stalled():
            return waiting
        time.sleep(0.002)
    return []


def _on_start(started: mmap.mmap, worker: int) -> None:
    started[worker] = 1
    outlive_stop_signals(worker)


def _end(workers: Any, stuck: list[Any]) -> None:
    for each in stuck:  # of its parent torch's handler takes it as a request, and no thread needs to run
        each.terminate()
    for each in stuck:
        each.join(_END_SECONDS)
    end_workers(workers)
    for each in stuck:  # one that had no handler yet
        if each.is_alive():
            each.kill()
