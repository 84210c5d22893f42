"""Workers that were forked while another thread held a lock are started again."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import threading
import time

import torch
from helpers.ranks import run_ranks

from colossus.data import build_loaders, worker_loader
from colossus.data.worker_loader import WorkerLoader


def _locked_at_start(rank: int, times: int) -> tuple[list[int], int, str]:
    """``times`` starts of worker 1 of 2 hang where torch's own do."""
    worker_loader.STALL_SECONDS = 0.4
    starts, set_threads = mmap.mmap(-1, 1), torch.set_num_threads

    def locked(number: int) -> None:
        if threading.current_thread() is threading.main_thread() and _worker() == 1:
            starts[0] += 1
            if starts[0] <= times:
                threading.Lock().acquire() and time.sleep(600.0)
        set_threads(number)

    torch.set_num_threads = locked
    error, items = "", []
    try:
        items = list(WorkerLoader(list(range(10, 20)), 2, range(6)))
    except RuntimeError as raised:
        error = str(raised)
    time.sleep(0.2)
    left = sum(child.is_alive() for child in torch.multiprocessing.active_children())
    return items, left, error


def _worker() -> int:
    name = torch.multiprocessing.current_process()._identity
    return (name[-1] - 1) % 2 if name else -1


def test_a_worker_that_was_locked_is_started_again() -> None:
    ((items, left, error),) = run_ranks(1, _locked_at_start, 2, with_context=False)
    assert (items, left, error) == (list(range(10, 16)), 0, "")


def test_one_that_is_locked_each_time_is_an_error_in_words() -> None:
    ((items, left, error),) = run_ranks(1, _locked_at_start, 100, with_context=False)
    assert (items, left) == ([], 0)
    assert error.startswith("data.num_workers = 2: a data loader worker was locked as it started, 5 times: ")


def test_workers_that_are_not_forked_read_too_and_end_by_their_rank_only() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        data = dict(type="PythonStdlib", max_bytes=20_000, num_workers=1)
        loaders = build_loaders(data, seed=0, global_batch_size=2, data_rank=0, data_size=1, seq_len=8)
        found = next(loaders.train)
        (worker,) = loaders.train.source._batches._workers  # type: ignore[attr-defined]
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        worker.join(0.5)
        assert worker.is_alive()
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == 0
    finally:
        multiprocessing.set_start_method(before, force=True)
    data = dict(type="PythonStdlib", max_bytes=20_000)
    wanted = next(build_loaders(data, seed=0, global_batch_size=2, data_rank=0, data_size=1, seq_len=8).train)
    assert torch.equal(found["inputs"], wanted["inputs"])


def test_a_worker_that_dies_as_it_starts_is_told_in_torchs_words() -> None:
    (error,) = run_ranks(1, _dies_at_start, with_context=False)
    assert "exited unexpectedly" in error


def _dies_at_start(rank: int) -> str:
    set_threads = torch.set_num_threads

    def die(number: int) -> None:
        if _worker() >= 0:
            os._exit(3)
        set_threads(number)

    torch.set_num_threads = die
    try:
        list(WorkerLoader(list(range(10)), 1, range(3)))
    except RuntimeError as raised:
        return str(raised)
    return ""
