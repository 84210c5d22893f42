"""One rank of a timed plan: it trains on request and returns the measurements."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colossus.comm import accounting
from colossus.config import load_config
from colossus.engine.initialize import make_engine
from colossus.monitor.metrics import by_axis, peak_memory
from colossus.monitor.mfu import Utilisation


@dataclass(frozen=True)
class Block:
    """Consecutive steps on one rank.

    Attributes:
        seconds: mean seconds of a step.
        tokens: mean tokens of a step, of all replicas.
        ideal_seconds: seconds of a step if all devices reached their peak; None where the peak is unknown.
        sent: axis -> mean calls and bytes that the rank sent along it in a step.
        peak_memory: peak bytes of the rank so far, see `peak_memory`.
    """

    seconds: float
    tokens: float
    ideal_seconds: float | None
    sent: dict[str, dict[str, float]]
    peak_memory: int


class TimedSteps:
    """The engine of a config file under a plan, without evaluations, checkpoints and the file's hooks.

    The batches of a block are read before its clock starts, so that data costs nothing. The model's output goes to
    standard error.
    """

    def __init__(self, file: str, overrides: Sequence[str], num_ranks: int) -> None:
        os.dup2(2, 1)
        self._engine = make_engine(load_config(file, overrides, num_ranks))
        self._batches = iter(self._engine.loader)
        self._utilisation = Utilisation.of(self._engine)

    def warm_up(self, steps: int) -> None:
        for batch in self._read(steps):
            self._engine.train_step(batch)
        self._synchronize()

    def block(self, steps: int) -> Block:
        """Time a number of steps, after an untimed one that refills caches after another plan's turn."""
        engine = self._engine
        first, *batches = self._read(1 + steps)
        engine.train_step(first)
        self._synchronize()
        with accounting.count() as moved:
            begin = time.perf_counter()
            results = [engine.train_step(batch) for batch in batches]
            self._synchronize()
            seconds = (time.perf_counter() - begin) / steps
        replicas = 1 if results[-1].replica is None else engine.context.size("data")
        tokens = sum(result.tokens for result in results) / steps
        counted = tokens if results[-1].replica_tokens is None else sum(r.replica_tokens or 0 for r in results) / steps
        sent = {axis: {key: value / steps for key, value in of.items()} for axis, of in by_axis(moved).items()}
        ideal = self._utilisation.at(counted)
        return Block(seconds, tokens * replicas, ideal, sent, peak_memory(engine.device)[0])

    def _read(self, count: int) -> list[Any]:
        batches = [batch for _, batch in zip(range(count), self._batches, strict=False)]
        if len(batches) < count:
            raise ValueError(
                f"the data ended after {self._engine.completed_steps + len(batches)} batches: let the loader start "
                f"over at its end, or take fewer --blocks and --steps"
            )
        return batches

    def _synchronize(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
