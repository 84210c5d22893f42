"""A real training step beside what its parts take: the factor that the tables of parts leave out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from colossus.config import Config, load_config
from colossus.context.local_ranks import LocalRanks
from colossus.engine.initialize import make_engine
from colossus.hardware.hardware import ranks_at_once
from colossus.hardware.measured import Measured, MeasuredFile
from colossus.planner.estimate import Estimator

#: a step of some tenths of a second, whose activations are of a few MB, as those of a model that fits a CPU
_CONFIG: dict[str, Any] = dict(
    model=dict(type="GPT", num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=128),
    data=dict(type="PythonStdlib"),
    optimizer=dict(type="AdamW", lr=1e-3),
    train=dict(steps=1, global_batch_size=16, clip_grad_norm=1.0),
    checkpoint=dict(every=0),
    device="cpu",
)
_WARMUP = 2


def step_factor(file: MeasuredFile, steps: int) -> float:
    """Return the seconds of a data-parallel training step over those that the planner adds up from the tables.

    There are as many replicas as cores, or as ranks were measured if these are fewer. The factor has what no table of
    parts shows: page faults of new activations, caches that other operators have filled, Python between operators,
    replicas that wait for the slowest, and the noise of the machine, since it is the median of steps while the parts
    are their minimum.

    Args:
        file: the measured parts, of CPUs.
        steps: steps that are timed.
    """
    replicas = min(file.ranks, ranks_at_once(file.cores, file.threads))
    batch = replicas * _CONFIG["train"]["global_batch_size"]
    overrides = [f"parallel.data={replicas}", f"train.global_batch_size={batch}"]
    config = load_config(_CONFIG, overrides, nproc=replicas)
    predicted = Estimator(Measured(file)).estimate(config).seconds
    return _measured_step(config, replicas, file.threads, steps) / predicted


def _measured_step(config: Config, replicas: int, threads: int, steps: int) -> float:
    """Return the seconds of a step of a plan, the mean over its ranks."""
    with LocalRanks(replicas, partial(_Trainer, config, threads), patience=60.0) as ranks:
        return statistics.mean(ranks.call("step_seconds", steps))


class _Trainer:
    def __init__(self, config: Config, threads: int, rank: int) -> None:
        torch.set_num_threads(threads)
        self._engine = make_engine(config)
        assert self._engine.loader is not None
        self._batches: Iterator[Any] = iter(self._engine.loader)

    def step_seconds(self, steps: int) -> float:
        """Return the median seconds of a step; reading its batch is not timed."""
        seconds = []
        for _ in range(_WARMUP + steps):
            batch = next(self._batches)
            began = time.perf_counter()
            self._engine.train_step(batch)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[_WARMUP:])
