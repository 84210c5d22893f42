"""Signals in the processes of a data loader.

A batch system that ends a job tells all of its processes, also those that read data; but the rank they read for has a
step to finish. So they end when that rank says so, or has gone, and by nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def blocked_sigterm() -> Iterator[None]:
    """Processes that are started here, with an interpreter of their own, begin with SIGTERM blocked, and so do the
    threads that their imports start: any thread that takes it ends the process."""
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    resource_tracker.ensure_running()  # which the first process started needs, and whose start unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_stop_signals(worker: int) -> None:
    """Let this process, a data loader's worker, end by its parent's SIGTERM only. A ``worker_init_fn``."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS: who has sent it cannot be known
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, name="colossus-sigterm", daemon=True).start()


def _end_when_told() -> None:
    rank = multiprocessing.parent_process()  # not the process above where a server has forked this one
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != (os.getppid() if rank is None else rank.pid):
        pass
    os._exit(0)
