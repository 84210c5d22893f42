"""An engine without processes and without a model: a loss that falls by one each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from colossus.config import load_config
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.fit import Hook
from colossus.engine.results import EvalResult


class FakeCheckpoints:
    """None are saved and none resumed, but hooks are told so.

    Attributes:
        on_resume: called with the hooks.
        on_save_after: steps after which hooks are told that a checkpoint is saved.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.hooks: list[Hook] = []
        self.on_resume: Callable[[list[Hook]], None] = lambda hooks: None
        self.on_save_after: set[int] = set()
        self.resumed_from: Path | None = None
        self.is_same_run = self.is_restart = self.save_requested = False
        self.resumed_plan = ""
        self.weights_match = None
        self.stall_seconds = 0.0

    def resume(self) -> None:
        self.on_resume(self.hooks)

    def after_step(self, *, is_last: bool = False) -> list[Any]:
        step: Any = self._engine.completed_steps
        if step in self.on_save_after:
            self.on_save_after.remove(step)
            for hook in self.hooks:
                hook.on_save(self._engine)  # type: ignore[arg-type]
        return []

    def finish_all(self, patience: float | None = None) -> None: ...


class FakeEngine:
    """What ``fit`` and the hooks read of an engine. ``stop_at`` and ``fail_at`` are step numbers."""

    def __init__(
        self, *, stop_at: int = 0, stop_in_evaluation: int = 0, fail_at: int = 0, validation: bool = True, **train: Any
    ) -> None:
        self.config = load_config({"train": {"global_batch_size": 1, **train}}, nproc=1)
        self.context = ParallelContext.from_config(self.config)
        self.device = torch.device("cpu")
        self.completed_steps, self.num_parameters, self.group_rules = 0, 8, ()
        self.loader: Any = itertools.repeat("batch")
        self.loaders = None
        self.strategy = Strategy()
        self.checkpoints = FakeCheckpoints(self)
        self.run = SimpleNamespace(folder=None, owes_evaluation=False)
        self.eval_loader = ["batch"] if validation else None
        self.stop_at, self.fail_at, self.stop_in_evaluation = stop_at, fail_at, stop_in_evaluation

    def train_step(self, batch: object) -> Any:
        assert batch == "batch"
        if self.completed_steps + 1 == self.fail_at:
            raise ArithmeticError("the fake engine fails")
        self.completed_steps += 1
        step = self.completed_steps
        return SimpleNamespace(
            step=step,
            loss=10.0 - step + 1 / 3,
            grad_norm=0.1 * step,
            tokens=7,
            lr=1e-3,
            stop_requested=step == self.stop_at,
            stop_signal=None,
            loss_scale=None,
            experts={},
            num_skipped=0,
            replica=None,
            replica_tokens=None,
            send_to_host=lambda: False,
            has_arrived=True,
            wait=lambda: None,
        )

    def request_stop(self) -> None:
        self.stop_at = self.completed_steps + 1

    def withdraw_stop(self) -> None:
        self.stop_at = self.stop_in_evaluation = 0

    def evaluate(self) -> Any:
        complete = self.completed_steps != self.stop_in_evaluation
        return EvalResult(3 * (20.0 - self.completed_steps), 3, step=self.completed_steps, complete=complete)


class Diary(Hook):
    """Writes down what it was called for."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_train_start(self, engine: Any) -> None:
        self.lines.append("start")

    def on_step_start(self, engine: Any) -> None:
        self.lines.append(f"begin {engine.completed_steps + 1}")

    def on_step_end(self, engine: Any, result: Any) -> None:
        self.lines.append(f"end {result.step}")

    def on_eval_end(self, engine: Any, summary: Any) -> None:
        self.lines.append(f"eval {summary.step}")

    def on_train_end(self, engine: Any) -> None:
        self.lines.append("done")

    def on_exception(self, engine: Any, error: BaseException) -> None:
        self.lines.append(f"{type(error).__name__}")
