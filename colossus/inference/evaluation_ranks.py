"""The processes of an evaluation: this one, or ranks of a plan that answer to it."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colossus import machine
from colossus.checkpoint.errors import CheckpointError
from colossus.config import Config
from colossus.config.sizes import world_size
from colossus.context.local_ranks import run_local_ranks
from colossus.engine.engine import Engine
from colossus.engine.initialize import make_engine
from colossus.engine.results import EvalSummary
from colossus.inference.ranks import follow, rank_options

#: seconds between two lines of progress
_BETWEEN = 0.5


def evaluate(folder: Path, config: Config) -> EvalSummary:
    """Evaluate the weights of a folder on the validation data of a config, under its plan.

    Raises:
        CheckpointError: when they are not those of the config's model, or damaged.
        RanksFailed: when a rank of several fails otherwise.
    """
    count = world_size(config.parallel)
    # as many as `colossus launch` gives a rank: the sums of a matmul depend on it in their last bits
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and int(given) else machine.threads_per_rank(count)
    if count == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return _evaluate(folder, config)
        finally:
            torch.set_num_threads(before)
    body = partial(_on_rank, folder, config, os.getpid(), threads)
    told, *_ = run_local_ranks(count, body, **rank_options(config))
    if isinstance(told, CheckpointError):
        raise told
    assert isinstance(told, EvalSummary)
    return told


def _on_rank(folder: Path, config: Config, parent: int, threads: int, rank: int) -> EvalSummary | CheckpointError:
    follow(parent, threads)
    try:
        return _evaluate(folder, config)
    except CheckpointError as error:  # on all ranks
        return type(error)(str(error))


def _evaluate(folder: Path, config: Config) -> EvalSummary:
    engine = make_engine(config)
    try:
        engine.checkpoints.load_weights(folder)
        _show_progress(engine)
        return engine.evaluate()
    finally:
        engine.close()


def _show_progress(engine: Engine) -> None:
    if not engine.context.is_logging_rank or not sys.stderr.isatty():
        return
    loaders = engine.loaders
    assert loaders is not None
    shown: Any = _Shown(loaders.validation, engine.config)
    engine.loaders = dataclasses.replace(loaders, validation=shown)


class _Shown:
    """Batches, with a line that says how many there were."""

    def __init__(self, batches: Any, config: Config) -> None:
        self._batches, self._most = batches, config.train.eval_batches

    def __iter__(self) -> Iterator[Any]:
        steps = getattr(getattr(self._batches, "source", None), "num_steps", None)
        total = min((each for each in (steps, self._most) if each is not None), default=None)
        of, last = f" of {total}" if total is not None else "", 0.0
        try:
            for number, batch in enumerate(self._batches, 1):
                if (now := time.perf_counter()) - last > _BETWEEN:
                    last = now
                    print(f"\rbatch {number}{of}", end="", file=sys.stderr, flush=True)
                yield batch
        finally:  # also of one that reads no more
            if last:
                print(f"\r{'':<40}\r", end="", file=sys.stderr, flush=True)
