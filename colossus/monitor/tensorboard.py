"""A hook that writes TensorBoard files: ``hooks = [dict(type="TensorBoard")]``. Needs the ``tensorboard`` extra."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from colossus.engine.fit import Hook
from colossus.engine.results import StepResult
from colossus.monitor.metrics import PATIENCE, LateResults


class TensorBoard(Hook):
    """Loss, gradient norm, learning rate, validation loss and metrics, from the logging rank; of steps whose numbers
    are a replica's own under ``train/replica_<index>``.

    Args:
        log_dir: by default ``tensorboard`` in the run folder.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        self.log_dir = log_dir
        self._writer: Any = None
        self._results: LateResults[dict[str, float]] = LateResults()

    def on_train_start(self, engine: Any) -> None:
        if not engine.context.is_logging_rank:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("the TensorBoard hook needs its extra: pip install 'colossus[tensorboard]'") from error
        folder = self.log_dir or str((engine.run.folder or Path(".")) / "tensorboard")
        # a run that goes on hides what an attempt before it has written of the steps that come again
        purged = engine.completed_steps + 1 if engine.checkpoints.resumed_from is not None else None
        self._writer = SummaryWriter(folder, purge_step=purged)

    def on_step_end(self, engine: Any, result: Any) -> None:
        if self._writer is not None:
            late = self._results.add(result, engine.strategy.consensus())
            self._results.take(self._write_step, but=late)

    def _write_step(self, result: StepResult, consensus: dict[str, float]) -> None:
        whose = "train" if result.replica is None else f"train/replica_{result.replica}"
        for name in ("loss", "grad_norm", "tokens"):
            self._writer.add_scalar(f"{whose}/{name}", getattr(result, name), result.step)
        for name, number in {"lr": result.lr, **consensus}.items():
            self._writer.add_scalar(f"train/{name}", number, result.step)
        if result.loss_scale is not None:
            self._writer.add_scalar("train/loss_scale", result.loss_scale, result.step)

    def on_eval_end(self, engine: Any, summary: Any) -> None:
        if self._writer is not None:
            for name, mean in {"loss": summary.loss, **summary.metrics}.items():
                self._writer.add_scalar(f"validation/{name}", mean, summary.step)
            for name, number in engine.strategy.consensus().items():
                self._writer.add_scalar(f"train/{name}", number, summary.step)

    def on_save(self, engine: Any) -> None:
        if self._writer is not None:
            self._results.take(self._write_step)
            self._writer.flush()

    def on_train_end(self, engine: Any) -> None:
        self._close()

    def on_exception(self, engine: Any, error: BaseException) -> None:
        self._close(patience=PATIENCE)

    def _close(self, *, patience: float = math.inf) -> None:
        if self._writer is not None:
            try:
                self._results.take(self._write_step, patience=patience)
            finally:
                self._writer.close()
