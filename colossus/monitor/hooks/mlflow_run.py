"""A run of MLflow: ``hooks = [dict(type="MLflow", experiment="gpt")]``. Needs ``pip install mlflow``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from colossus.config import as_dict, by_path
from colossus.monitor.hooks.options import MLflowOptions
from colossus.monitor.hooks.tracker import TrackedRun, Tracker, charts_of

#: limits of MLflow: parameters in a batch, and letters of a value
_MOST_PARAMS, _LONGEST_PARAM = 100, 500


class MLflow(Tracker):
    """A tracker that logs the config as parameters and rows as metrics.

    After a resume, repeated steps are logged again, in the same run.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = MLflowOptions(**options)
        self._client: Any = None

    def start(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient(self.options.tracking_uri)
        if self.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            return
        name = self.options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or str(run.config.name)
        existing = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        self.run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(_name(key), str(value)[:_LONGEST_PARAM]) for key, value in by_path(as_dict(run.config))]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + _MOST_PARAMS])

    def write(self, row: Mapping[str, Any]) -> None:
        at, step = round(1000 * row["time"]), row["step"]
        metrics = [self._metric(_name(key), number, at, step) for key, number in charts_of(row).items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, *, is_good: bool) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if is_good else "FAILED")


def _name(key: str) -> str:
    """Return a key with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", key)
