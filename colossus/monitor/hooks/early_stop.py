"""A hook that ends a run which does not improve: ``hooks = [dict(type="EarlyStop", patience=5)]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.engine.engine import Engine
from colossus.engine.results import EvalResult
from colossus.monitor.hooks.metric_hook import MetricHook
from colossus.monitor.hooks.options import EarlyStopOptions


class EarlyStop(MetricHook):
    """A hook that requests a stop once ``patience`` evaluations in a row were no better than the best before.

    All ranks see the same numbers, and stop after the next step (`Engine.request_stop`). A resumed run continues the
    count. A run that had stopped makes one step, and stops again unless it has more patience now.
    """

    def __init__(self, **options: Any) -> None:
        self.options: EarlyStopOptions = EarlyStopOptions(**options)
        self._best: float | None = None
        self._best_step = self._num_worse = 0

    def on_train_start(self, engine: Engine) -> None:
        super().on_train_start(engine)
        self._stop_if_due(engine)

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        value = self.value_of(summary)
        if self.is_better(value, self._best, self.options.min_delta):
            self._best, self._best_step, self._num_worse = value, summary.step, 0
        else:
            self._num_worse += 1
        self._stop_if_due(engine)

    def on_train_end(self, engine: Engine) -> None:
        if self._is_due and engine.context.is_logging_rank:
            best = "" if self._best is None else f" than {self._best:.6g} after step {self._best_step}"
            why = f"{self.options.metric} was no better{best} in {self._num_worse} evaluations in a row"
            print(f"stopped early after step {engine.completed_steps}: {why}", flush=True)

    @property
    def _is_due(self) -> bool:
        return self._num_worse >= self.options.patience

    def _stop_if_due(self, engine: Engine) -> None:
        if self._is_due:
            engine.request_stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "num_worse": self._num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._best_step, self._num_worse = state["best"], state["best_step"], state["num_worse"]
