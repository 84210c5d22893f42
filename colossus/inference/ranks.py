"""Who holds a model: this process, or processes of it, one for each rank of a plan, that answer to it. What ends this
process (Ctrl-C, a closed pipe) ends the ranks in no collective."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from colossus import machine
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.config import Config
from colossus.config.plans import world_size
from colossus.context.local_ranks import LocalRanks
from colossus.context.world import choose_backend
from colossus.inference.config import WeightSource
from colossus.inference.decoding import Decoding
from colossus.inference.model import load_model

T = TypeVar("T")
#: what a rank gives as an answer, as all ranks do
_REFUSALS = (DamagedCheckpoint, CheckpointError, FloatingPointError)


@contextmanager
def on_ranks(
    config: Config, make: Callable[[], Any], threads: int | None = None
) -> Iterator[Callable[[Callable[[Any], T]], T]]:
    """Inside, ``call(work)`` is ``work(made)`` on each rank, where ``made`` is what ``make()`` gave and has a method
    ``close``; it answers what the first rank does.

    Args:
        threads: of each rank, unless ``OMP_NUM_THREADS`` says another number; by default as `colossus launch` gives.

    Raises:
        CheckpointError, FloatingPointError: what all ranks refuse.
        RanksFailed: for any other error on one of several.
    """
    count, given = world_size(config.parallel), os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and int(given) else threads or machine.threads_per_rank(count)
    if count == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with closing(make()) as made:
                yield lambda work: work(made)
        finally:
            torch.set_num_threads(before)
        return
    uses_cuda = config.device != "cpu" and torch.cuda.is_available()
    sys.stdout.flush()  # what is buffered would be printed again by forked ranks
    sys.stderr.flush()
    with LocalRanks(
        count,
        partial(_Rank, make, os.getpid(), threads),
        start="spawn" if uses_cuda or sys.platform == "darwin" else "fork",
        backend=choose_backend(config.comm.backend, "cuda" if uses_cuda else "cpu"),
        collective_timeout=config.comm.timeout_seconds,
    ) as ranks:

        def call(work: Callable[[Any], T]) -> T:
            answer: Any = ranks.call("call", work)[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        yield call


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
    os._exit(1)


def decoding_of(source: WeightSource, config: Config, **options: Any) -> Decoding:
    """Prompts on their way through the model of a checkpoint; the options are those of `Decoding`."""
    return Decoding(load_model(source, config), **options)
