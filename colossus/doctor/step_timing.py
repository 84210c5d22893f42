"""Real training steps beside what their parts take: the factors that the tables of parts leave out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from colossus.config import Config, load_config
from colossus.config.plans import world_size
from colossus.context.local_ranks import LocalRanks
from colossus.doctor.rank_timing import group_sizes
from colossus.engine.initialize import make_engine
from colossus.hardware.hardware import ranks_at_once
from colossus.hardware.measured import Measured, MeasuredFile
from colossus.planner.estimate import Estimator

_HEADS = 4
#: samples of a replica
_BATCH = 16
#: a step of some tenths of a second, whose activations are of a few MB, as those of a model that fits a CPU
_CONFIG: dict[str, Any] = dict(
    model=dict(type="GPT", num_layers=4, hidden_size=128, num_heads=_HEADS, vocab_size=256, seq_len=128),
    data=dict(type="PythonStdlib"),
    optimizer=dict(type="AdamW", lr=1e-3),
    train=dict(steps=1, clip_grad_norm=1.0),
    checkpoint=dict(every=0),
    device="cpu",
)
_WARMUP = 2
#: a smaller factor comes from a disturbance while the parts were measured
_LEAST = 0.5


def calibrated(file: MeasuredFile, steps: int) -> MeasuredFile:
    """Return a file of measured parts, of CPUs, with the factors by which parts take longer in a training step.

    ``step_factor`` comes from a data-parallel step, of as many replicas as cores, or as ranks were measured if these
    are fewer. It has what no table of parts shows: page faults of new activations, caches that other operators have
    filled, Python between operators, replicas that wait for the slowest, and the noise of the machine, since it is the
    median of steps while the parts are their minimum. ``traffic_factor`` comes from a step under 1D tensor parallelism,
    whose activations are in no cache when they travel.

    Args:
        file: the measured parts.
        steps: steps of each plan that are timed.
    """
    replicas = min(file.ranks, ranks_at_once(file.cores, file.threads))
    config = _config(data=replicas, batch=replicas * _BATCH)
    file = _fitted(file, "step_factor", config, steps)
    tensor = max((size for size in group_sizes(file.ranks) if _HEADS % size == 0), default=1)
    if tensor > 1:
        file = _fitted(file, "traffic_factor", _config(tensor=tensor, batch=replicas * _BATCH), steps)
    return file


def _fitted(file: MeasuredFile, factor: str, config: Config, steps: int) -> MeasuredFile:
    """Return a file with the factor under which the predicted step, which is linear in it, is the measured one."""
    once, twice = (_predicted(file.model_copy(update={factor: value}), config) for value in (1.0, 2.0))
    value = 1.0 + (_measured_step(config, file.threads, steps) - once) / (twice - once)
    return file.model_copy(update={factor: max(_LEAST, value)})


def _config(*, data: int = 1, tensor: int = 1, batch: int) -> Config:
    overrides = [f"parallel.data={data}", f"parallel.tensor={tensor}", f"train.global_batch_size={batch}"]
    return load_config(_CONFIG, overrides, nproc=data * tensor)


def _predicted(file: MeasuredFile, config: Config) -> float:
    return Estimator(Measured(file)).estimate(config).seconds


def _measured_step(config: Config, threads: int, steps: int) -> float:
    """Return the seconds of a step of a plan, the mean over its ranks."""
    with LocalRanks(world_size(config.parallel), partial(_Trainer, config, threads), patience=60.0) as ranks:
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
