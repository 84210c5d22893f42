"""Processes that read data end when their rank says so, not when a batch system tells all processes of a job."""

from __future__ import annotations

import os
import signal
import time

from helpers.launching import is_running
from torch.utils.data import DataLoader

from colossus.data.worker_signals import outlive_stop_signals


class Numbers:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index > 50:
            time.sleep(60)
        return index


def test_only_the_parent_ends_a_worker() -> None:
    batches = iter(DataLoader(Numbers(), batch_size=None, num_workers=1, worker_init_fn=outlive_stop_signals))
    assert int(next(batches)) == 0
    (worker,) = batches._workers
    sender = os.fork()
    if not sender:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker.pid, signum)
        os._exit(0)
    os.waitpid(sender, 0)
    assert [int(next(batches)) for _ in range(20)] == list(range(1, 21))
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
    assert not is_running(worker.pid)
