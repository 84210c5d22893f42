"""The ranks of a plan as processes that answer calls of this one, and that end with it without a hung collective."""

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
from colossus.comm.peer_gone import is_of_a_peer
from colossus.config import Config
from colossus.config.plans import world_size
from colossus.context.local_ranks import LocalRanks
from colossus.context.world import choose_backend
from colossus.engine.deterministic import VARIABLES

#: errors that a rank returns as its answer, since all ranks get the same
_REFUSALS = (DamagedCheckpoint, CheckpointError, FloatingPointError)


def threads_of(config: Config, wanted: int | None = None) -> int:
    """Return the compute threads of each rank: ``OMP_NUM_THREADS``, ``wanted``, or what `colossus launch` would set."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(variable) if variable.isdecimal() else 0
    return threads or wanted or machine.threads_per_rank(world_size(config.parallel))


def hold_ranks(config: Config, make: Callable[[], Any], threads: int) -> LocalRanks:
    """Start the ranks of a config's plan as processes that answer calls.

    ``ranks.call("call", work)`` returns ``work(made)`` of each rank, where ``made`` is the result of ``make()`` in the
    first call. An answer may be a `CheckpointError` or a FloatingPointError.

    Args:
        config: the config with the plan.
        make: makes the object that each rank works with; it must be picklable on CUDA.
        threads: the compute threads of each rank.

    Raises:
        RanksFailed: see `LocalRanks`.
    """
    uses_cuda = config.device != "cpu" and torch.cuda.is_available()
    sys.stdout.flush()  # forked ranks would print buffered text again
    sys.stderr.flush()
    return LocalRanks(
        world_size(config.parallel),
        partial(_Rank, make, os.getpid(), threads),
        start="spawn" if uses_cuda or sys.platform == "darwin" else "fork",
        backend=choose_backend(config.comm.backend, "cuda" if uses_cuda else "cpu"),
        collective_timeout=config.comm.timeout_seconds,
        variables=VARIABLES if config.train.is_deterministic else None,  # the process group may start CUDA
        is_victim=is_of_a_peer,
    )


class _Rank:
    """A rank in a process of its own, which ignores Ctrl-C and ends with the process that has started it."""

    def __init__(self, make: Callable[[], Any], parent: int, threads: int, rank: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        torch.set_num_threads(threads)
        self._make, self._made = make, None

    def call(self, work: Callable[[Any], Any]) -> Any:
        """Return the result of the work, or an error of `_REFUSALS` that it or the making raised."""
        try:
            self._made = self._made or self._make()
            return work(self._made)
        except _REFUSALS as error:
            return next(kind for kind in _REFUSALS if isinstance(error, kind))(str(error))


def _end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(129)  # the exit code after a hang-up
