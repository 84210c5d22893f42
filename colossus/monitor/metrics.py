"""``metrics.jsonl``: one JSON object per step, written by the logging rank once its numbers have arrived."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from colossus.comm import accounting
from colossus.comm.late import Late
from colossus.config.training import Train
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, evaluation_due
from colossus.engine.results import EvalResult, StepResult
from colossus.machine import peak_resident_bytes
from colossus.monitor.mfu import Utilisation
from colossus.monitor.row_file import RowFile

#: seconds that a failed run waits for the numbers of a step, since its device may be stuck
PATIENCE = 5.0


class StepTimer:
    """Seconds of a step: from its start, or the end of the step before, to its end, without evaluations."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


def peak_memory(device: torch.device) -> tuple[int, int | None]:
    """Return the peak memory of this process in bytes: of tensors on its GPU, and as reserved by torch's allocator.

    A reserved size far above the first is fragmentation. On the CPU it is the resident memory, and None. It waits for
    nothing.
    """
    if device.type != "cuda":
        return peak_resident_bytes(), None
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # read once, for both
    allocated, reserved = (stats[f"{kind}_bytes"]["all"]["peak"] if stats else 0 for kind in ("allocated", "reserved"))
    return allocated, reserved


def by_axis(counter: accounting.Counter) -> dict[str, dict[str, float]]:
    """Return calls and bytes sent along each axis (``data``), or along several axes that a collective joins."""
    names = sorted({axes for _, axes, _ in counter.entries})
    return {axes: {"calls": counter.calls(axes), "bytes": counter.bytes(axes)} for axes in names}


class Metrics(Hook):
    """The rows of a run, one for each step, written once its numbers have arrived.

    Numbers are not rounded; a missing one is ``NaN``.

    =========================================== =====================================================================
    step, loss, grad_norm, lr, tokens           of the step; the norm before clipping
    tokens_per_second, step_seconds             without evaluations
    memory_bytes, time                          peak memory of this rank so far (`peak_memory`)
    memory_reserved_bytes, mfu                  on a GPU; mfu if the device's peak and the model's operations are
                                                known, over all devices (those of a replica, if replicas do not wait)
    validation_loss, validation_<name>          if an evaluation followed, also of each of ``eval_metrics``
    replica                                     loss, norm and tokens of the row are of this replica alone
    consensus_distance                          if replicas were averaged
    skipped, loss_scale                         steps skipped so far, if steps can be; under fp16
    experts                                     of each router by name, if there are any: `StepResult.experts`
    comm                                        with ``comm.accounting``: axis -> calls and bytes that this rank sent
    checkpoint_stall_seconds                    time that training waited for checkpoints since the row before
    =========================================== =====================================================================

    No row waits for an accelerator. The row of a step is written when the next step is over, before the end of an
    evaluation or a checkpoint, at the end of the run and after an error. Its ``step_seconds`` are the time between two
    such moments, so they add up to the run's. The row of a step that is evaluated waits for the evaluation; ``flush``
    and a stop write it without, and a later evaluation completes the last row. Before a checkpoint is complete, the
    rows of its steps are on the disk. A run that resumes after step N keeps the rows up to N and drops later ones,
    whose steps are repeated.

    `Hook.add_to_row` of all hooks of the run may add to a row, and `Hook.on_row` receives each row that is written, on
    the thread that trains.

    Args:
        path: the file; rows are appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: RowFile | None = None
        #: results with the seconds of each step and further values of its row
        self._rows: Late[StepResult, tuple[float, dict[str, Any]]] = Late()
        self._train = Train()
        self._timer = StepTimer()
        self._counts = False
        self._counting = ExitStack()
        self._moved: accounting.Counter | None = None
        self._stalled = 0.0
        self._utilisation = Utilisation()
        self._hooks: Sequence[Any] = ()
        #: rows that are written and that the hooks have not received yet
        self._written: deque[dict[str, Any]] = deque()

    def on_train_start(self, engine: Engine) -> None:
        self._hooks = engine.checkpoints.hooks
        self._utilisation = Utilisation.of(engine)
        self._stalled = engine.checkpoints.stall_seconds
        if engine.context.is_logging_rank:
            continues = engine.checkpoints.resumed_from is not None or engine.checkpoints.is_restart
            self._file = RowFile(self._path, engine.completed_steps if continues else None)
            self._counts, self._train = engine.config.comm.accounting, engine.config.train
        self._timer.start()

    def on_step_start(self, engine: Engine) -> None:
        if self._counts:
            self._moved = self._counting.enter_context(accounting.count())
        self._timer.start()

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        seconds = self._timer.stop()
        self._counting.close()
        if not engine.context.is_logging_rank:
            return
        allocated, reserved = peak_memory(engine.device)
        more: dict[str, Any] = {"memory_bytes": allocated, "time": time.time()}
        more |= engine.strategy.report() | engine.strategy.consensus()
        if reserved is not None:
            more["memory_reserved_bytes"] = reserved
        if self._moved is not None:
            more["comm"] = by_axis(self._moved)
        stalled, self._stalled = self._stalled, engine.checkpoints.stall_seconds
        if stalled != self._stalled:
            more["checkpoint_stall_seconds"] = self._stalled - stalled
        late = self._rows.add(result, (seconds, more))
        self._write(but=max(late, int(evaluation_due(engine, result.step))))

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        row = self._rows.last
        if row is not None:
            row[1].update(summary.numbers | engine.strategy.consensus())
        elif self._file is not None and self._file.complete(summary.step, summary.numbers):
            self._written.append({"step": summary.step, "time": time.time(), **summary.numbers})
        self._write()

    def on_save(self, engine: Engine) -> None:
        self._write()
        if self._file is not None:
            self._file.flush()

    def on_train_end(self, engine: Engine) -> None:
        self._write()

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self._counting.close()
        try:
            self._write(patience=PATIENCE)
        except ValueError as second:  # an error of a batch may be the one that has ended the run
            if str(second) != str(error):
                raise

    def flush(self) -> None:
        """Write the rows whose numbers have arrived, without waiting for a device. Any thread may call it."""
        self._rows.take(self._write_row, patience=0.0)

    def _write(self, *, but: int = 0, patience: float = math.inf) -> None:
        self._rows.take(self._write_row, but=but, patience=patience)
        while self._written:
            row = self._written.popleft()
            for hook in self._hooks:
                hook.on_row(row)

    def _write_row(self, result: StepResult, data: tuple[float, dict[str, Any]]) -> None:
        seconds, more = data
        row = {key: getattr(result, key) for key in ("step", "loss", "grad_norm", "lr", "tokens")}
        row |= {"tokens_per_second": result.tokens / seconds, "step_seconds": seconds, **more}
        row |= {"experts": result.experts} if result.experts else {}
        counted = result.tokens if result.replica_tokens is None else result.replica_tokens
        mfu = self._utilisation.at(counted / seconds)
        has_scale = result.loss_scale is not None
        optional = {"mfu": mfu, "replica": result.replica, "loss_scale": result.loss_scale}
        row |= {key: value for key, value in optional.items() if value is not None}
        row |= {"skipped": result.num_skipped} if has_scale or self._train.on_nonfinite == "skip" else {}
        row |= {name: number for hook in self._hooks for name, number in hook.add_to_row(row).items()}
        self._written.append(row)
        if self._file is not None:
            self._file.append(row)
