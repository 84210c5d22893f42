"""Processes that read data: they end when their rank says so, and one that is locked is told in words."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
from helpers.datasets import Numbers, loaders, same
from helpers.launching import is_running
from helpers.ranks import run_ranks


def begun(data: dict[str, Any]) -> tuple[Any, Any]:
    """A loader that has read a batch, and its worker."""
    before = torch.multiprocessing.active_children()
    train = loaders(data).train
    next(train)
    (worker,) = [child for child in torch.multiprocessing.active_children() if child not in before]
    return train, worker


def test_workers_go_when_the_loader_goes() -> None:
    """A reference cycle would leave them to the garbage collector, which takes 5 s over each."""
    train, worker = begun({"type": Numbers, "num_workers": 1})
    gc.disable()
    try:
        del train
        assert not worker.is_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.long)])
def test_only_its_rank_ends_a_worker(method: str) -> None:
    train, worker = begun({"type": Numbers(), "num_workers": 1, "multiprocessing_context": method})
    plain = loaders(Numbers()).train
    next(plain)
    sender = os.fork()
    if not sender:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker.pid, signum)
        os._exit(0)
    os.waitpid(sender, 0)
    for _ in range(12):
        assert same(next(train), next(plain))
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
    assert not is_running(worker.pid)


def _locked(rank: int) -> str:
    """A worker hangs where torch's own does: as it starts, in a lock of the C library."""
    rank_pid = os.getpid()
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1  # which torch waits for it to end by itself
    torch.set_num_threads = lambda number: time.sleep(600.0 * (os.getpid() != rank_pid))
    try:
        next(loaders({"type": Numbers, "num_workers": 1, "worker_timeout": 1}).train)
    except TimeoutError as error:
        return str(error)
    return ""


def test_a_worker_that_gives_nothing_is_told_in_words() -> None:
    (words,) = run_ranks(1, _locked, with_context=False)
    assert words.startswith(
        "data.num_workers = 1: no batch came from a data loader worker in 1 s (data.worker_timeout)"
    )
    assert "data.multiprocessing_context='forkserver'" in words
