"""A run of Weights & Biases: ``hooks = [dict(type="WandB", project="gpt")]``. Needs ``pip install wandb``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from colossus.config import as_dict
from colossus.monitor.hooks.options import WandBOptions
from colossus.monitor.hooks.tracker import Histogram, TrackedRun, Tracker, charts_of


class WandB(Tracker):
    """A tracker that logs config, rows and histograms; its files are in the run folder. The x-axis is ``step``.

    After a resume, repeated steps are logged again, under the same id.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = WandBOptions(**options)
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        import wandb

        self._package, options = wandb, self.options
        self._run = wandb.init(
            project=options.project or os.environ.get("WANDB_PROJECT") or run.config.name,
            entity=options.entity,
            group=options.group,
            tags=options.tags,
            mode=options.mode,
            name=run.name,
            dir=str(run.folder),
            config=as_dict(run.config),
            id=self.run_id,
            resume=None if self.run_id is None else "allow",
            settings=wandb.Settings(console="off", quiet=True),
        )
        self.run_id = self._run.id
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({"step": row["step"], **charts_of(row)})

    def write_histogram(self, histogram: Histogram) -> None:
        drawn = self._package.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._run.log({"step": histogram.step, f"{histogram.kind}/{histogram.name}": drawn})

    def close(self, *, is_good: bool) -> None:
        self._run.finish(exit_code=0 if is_good else 1)
