"""The ranks of a plan as processes that answer to this one. What ends this process (Ctrl-C, a closed pipe) ends them in
no collective.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from colossus import machine
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.config import Config
from colossus.config.plans import world_size
from colossus.context.local_ranks import LocalRanks
from colossus.context.world import choose_backend
from colossus.engine.deterministic import VARIABLES

#: what a rank gives as an answer, as all ranks do
_REFUSALS = (DamagedCheckpoint, CheckpointError, FloatingPointError)


def threads_of(config: Config, wanted: int | None = None) -> int:
    """Compute threads of each rank: ``OMP_NUM_THREADS``, else those wanted, else as many as `colossus launch` gives."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() else 0
    return threads or wanted or machine.threads_per_rank(world_size(config.parallel))


def hold_ranks(config: Config, make: Callable[[], Any], threads: int) -> LocalRanks:
    """Processes of which ``ranks.call("call", work)`` answers with ``work(made)`` of each, by rank, where ``made`` is
    what ``make()`` gave in the first call: an answer may be a `CheckpointError` or a FloatingPointError.

    Args:
        config: whose plan it is.
        make: on CUDA it must be picklable.
        threads: of each rank.

    Raises:
        RanksFailed: as `LocalRanks`.
    """
    uses_cuda = config.device != "cpu" and torch.cuda.is_available()
    sys.stdout.flush()  # what is buffered would be printed again by forked ranks
    sys.stderr.flush()
    return LocalRanks(
        world_size(config.parallel),
        partial(_Rank, make, os.getpid(), threads),
        start="spawn" if uses_cuda or sys.platform == "darwin" else "fork",
        backend=choose_backend(config.comm.backend, "cuda" if uses_cuda else "cpu"),
        collective_timeout=config.comm.timeout_seconds,
        variables=VARIABLES if config.train.deterministic else None,  # the process group may start CUDA
    )


class _Rank:
    """In a process of its own: Ctrl-C is the affair of the process that has started it, with which it ends."""

    def __init__(self, make: Callable[[], Any], parent: int, threads: int, rank: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        torch.set_num_threads(threads)
        self._make, self._made = make, None

    def call(self, work: Callable[[Any], Any]) -> Any:
        """What the work returns, or what our code refuses, here or in the making."""
        try:
            self._made = self._made or self._make()
            return work(self._made)
        except _REFUSALS as error:
            return next(kind for kind in _REFUSALS if isinstance(error, kind))(str(error))


def _end_with(parent: int) -> None:
    """End when the parent has, however it did."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(129)  # as by a hang-up
