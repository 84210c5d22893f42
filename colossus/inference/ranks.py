"""The ranks that hold a model: this process, or processes of it that answer to this one.

Their parent has the prompts and prints the text. So what ends it (Ctrl-C, a closed pipe) ends them, in no collective.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from colossus import machine
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.config import Config, ConfigError
from colossus.config.sizes import world_size
from colossus.context.local_ranks import LocalRanks, RanksFailed
from colossus.context.world import choose_backend
from colossus.inference.decoding import Decoding, DecodingFailed
from colossus.inference.sampling_options import Sampling
from colossus.inference.source import Source
from colossus.inference.text_model import TextModel, load_model
from colossus.launch.data_check import is_ours

#: a smaller model has one thread, see `threads_alone`
_FEW_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class Loaded:
    """What rank 0 tells of its model, or why there is none."""

    problem: Exception | None = None
    num_positions: int | None = None
    why_not_cached: str = ""


@dataclass(frozen=True)
class Step:
    """What a step gave.

    Attributes:
        tokens: the new ones, by row.
        ended: why rows have ended so far.
        fed: see `Decoding`.
    """

    tokens: list[int | None]
    ended: list[str | None]
    fed: tuple[int, int]


class _Rank:
    """The model on one rank; its methods are called on all of them at once."""

    def __init__(self, source: Source, config: Config) -> None:
        self._model: TextModel | None = None
        self._decoding: Decoding | None = None
        try:
            model = self._model = load_model(source, config)
        except (CheckpointError, ConfigError, ValueError) as error:
            if not isinstance(error, (CheckpointError, ConfigError)) and not is_ours(error):
                raise  # of a user's own code, with its traceback
            kind = next(each for each in (DamagedCheckpoint, CheckpointError, ValueError) if isinstance(error, each))
            self.loaded = Loaded(kind(str(error)))
        else:
            self.loaded = Loaded(None, model.num_positions, model.why_not)

    def told(self) -> Loaded:
        return self.loaded

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        stop: Collection[int],
        num_ids: int | None,
    ) -> str:
        """Why it cannot; nothing when it can."""
        assert self._model is not None
        try:
            self._decoding = Decoding(
                self._model, prompts, max_tokens=max_tokens, sampling=sampling, stop=stop, num_ids=num_ids
            )
        except ValueError as error:  # on all ranks
            return str(error)
        return ""

    def step(self) -> Step:
        assert self._decoding is not None
        return Step(self._decoding.step(), list(self._decoding.ended), self._decoding.fed)

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


class Ranks:
    """The ranks of a plan; ``with Ranks(..) as ranks``.

    Raises:
        CheckpointError, ValueError: what a rank finds wrong when it loads the model.
        RanksFailed: when one fails otherwise, here and in calls.
    """

    def __init__(self, source: Source, config: Config) -> None:
        count = world_size(config.parallel)
        self._alone: _Rank | None = None
        self._ranks: LocalRanks | None = None
        self._threads = torch.get_num_threads()
        try:
            if count == 1:
                torch.set_num_threads(threads_alone(source, self._threads))
                self._alone = _Rank(source, config)
            else:
                make = partial(_make, source, config, os.getpid(), machine.threads_per_rank(count))
                self._ranks = LocalRanks(count, make, **rank_options(config))
            self.loaded: Loaded = self._call("told")
            if self.loaded.problem is not None:
                raise self.loaded.problem
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling,
        stop: Collection[int] = (),
        num_ids: int | None = None,
    ) -> None:
        """Begin with a batch; see `Decoding`."""
        problem = self._call("begin", prompts, max_tokens, sampling, stop, num_ids)
        if problem:
            raise ValueError(problem)

    def step(self) -> Step:
        """One step of all ranks.

        Raises:
            DecodingFailed: when there is no next token.
        """
        try:
            made: Step = self._call("step")
        except RanksFailed as failed:  # one rank said why; others that waited for it may say that it has gone
            name = f"{DecodingFailed.__module__}.{DecodingFailed.__qualname__}: "
            lines = [line for text in failed.tracebacks.values() for line in text.splitlines()]
            told = next((line.removeprefix(name) for line in lines if line.startswith(name)), None)
            if told is None:
                raise
            raise DecodingFailed(told) from None
        return made

    def _call(self, method: str, *args: Any) -> Any:
        if self._alone is not None:
            return getattr(self._alone, method)(*args)
        assert self._ranks is not None
        return self._ranks.call(method, *args)[0]

    def close(self) -> None:
        if self._alone is not None:
            self._alone.close()
        if self._ranks is not None:
            self._ranks.close()
        torch.set_num_threads(self._threads)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def threads_alone(source: Source, most: int) -> int:
    """Threads of a model in one process: one where it is small, unless ``OMP_NUM_THREADS`` says how many.

    The operations of a small model are too short to share out: two threads gain nothing, and where others use the cores
    each operation waits for the slower one (a model of 840,000 parameters took 12 times as long). A fixed rule, by no
    measurement: the sums of a product depend on the threads in their last bits, and text must not depend on the load.
    """
    sizes = (math.prod(entry.shape) for key, entry in source.manifest.tensors.items() if key.startswith("model/"))
    return most if os.environ.get("OMP_NUM_THREADS") or sum(sizes) >= _FEW_PARAMETERS else 1


def _make(source: Source, config: Config, parent: int, threads: int, rank: int) -> _Rank:
    follow(parent, threads)
    return _Rank(source, config)


def rank_options(config: Config) -> dict[str, Any]:
    """How `LocalRanks` starts the ranks of a command."""
    uses_cuda = config.device != "cpu" and torch.cuda.is_available()
    sys.stdout.flush()  # what is buffered would be printed again by forked ranks
    sys.stderr.flush()
    return {
        "start": "spawn" if uses_cuda or sys.platform == "darwin" else "fork",
        "backend": choose_backend(config.comm.backend, "cuda" if uses_cuda else "cpu"),
        "collective_timeout": config.comm.timeout_seconds,
    }


def follow(parent: int, threads: int) -> None:
    """On a rank of a command: Ctrl-C is the affair of the process that has started it, whose end is its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)


def _end_with(parent: int) -> None:
    """End when the parent has, however it did."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
