"""TensorBoard files: ``hooks = ["TensorBoard"]``. Needs the ``tensorboard`` extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.config.user_path import user_path
from colossus.monitor.hooks.options import TensorBoardOptions
from colossus.monitor.hooks.tracker import Histogram, TrackedRun, Tracker, charts_of


class TensorBoard(Tracker):
    """A tracker that shows each number of the rows as a chart, and histograms.

    A resumed run hides the points of an earlier attempt whose steps are repeated.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._log_dir = TensorBoardOptions(**options).log_dir
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = run.step + 1 if run.is_resumed else None
        self._writer = SummaryWriter(
            str(user_path(self._log_dir) if self._log_dir else run.folder / "tensorboard"), purge_step=purge_step
        )

    def write(self, row: Mapping[str, Any]) -> None:
        for name, number in charts_of(row).items():
            self._writer.add_scalar(name, number, row["step"], walltime=row["time"])

    def write_histogram(self, histogram: Histogram) -> None:
        edges, counts = histogram.edges, histogram.counts
        self._writer.add_histogram_raw(
            f"{histogram.kind}/{histogram.name}", edges[0], edges[-1], sum(counts), sum=0.0, sum_squares=0.0,
            bucket_limits=edges[1:], bucket_counts=counts, global_step=histogram.step,
        )  # fmt: skip

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, is_good: bool) -> None:
        self._writer.close()
