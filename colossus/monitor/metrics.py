"""``metrics.jsonl``: one JSON object per step, written by the logging rank as soon as its numbers are there."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus.comm import accounting
from colossus.config.training import Train
from colossus.engine.engine import Engine
from colossus.engine.fit import evaluation_due
from colossus.engine.hooks import Hook
from colossus.engine.results import EvalSummary, StepResult
from colossus.monitor.late_results import PATIENCE, LateResults
from colossus.monitor.mfu import Utilisation
from colossus.monitor.peak_memory import peak_memory


class StepTimer:
    """Seconds of a step: from its start (or the end of the one before) to its end, without evaluations."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


def by_axis(counter: accounting.Counter) -> dict[str, dict[str, float]]:
    """Calls and bytes sent along each axis (``data``), or tuple of axes that a collective takes as one."""
    names = sorted({axes for _, axes, _ in counter.entries})
    return {axes: {"calls": counter.calls(axes), "bytes": counter.bytes(axes)} for axes in names}


def keep_rows(path: Path, last_step: int, more: Mapping[str, Any] | None = None) -> None:
    """Keep the rows of steps up to ``last_step``, all or nothing at any moment. Half rows go, too.

    Args:
        more: for the row of that step.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    kept = [line for line in lines if line.endswith(b"\n") and 0 < _step_of(line) <= last_step]
    if more and kept and _step_of(kept[-1]) == last_step:
        kept[-1] = (json.dumps({**json.loads(kept[-1]), **more}) + "\n").encode()
    if kept == lines:
        return
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _of_evaluation(summary: EvalSummary) -> dict[str, float]:
    return {"validation_loss": summary.loss, **{f"validation_{name}": mean for name, mean in summary.metrics.items()}}


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


@dataclass
class _Row:
    """Of a row what the host knows when the step is over.

    Attributes:
        seconds: of the step.
        measured: what follows the numbers of the step.
        more: what ends the row.
    """

    seconds: float
    measured: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def with_numbers(self, result: StepResult, train: Train, utilisation: Utilisation) -> dict[str, Any]:
        """The whole row, of numbers that are there."""
        row = {
            "step": result.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_second": result.tokens / self.seconds,
            "step_seconds": self.seconds,
            **self.measured,
        }
        counted = result.tokens if result.replica_tokens is None else result.replica_tokens
        mfu = utilisation.at(counted / self.seconds)
        if mfu is not None:
            row["mfu"] = mfu
        if result.replica is not None:
            row["replica"] = result.replica
        if result.loss_scale is not None:
            row["loss_scale"] = result.loss_scale
        if result.loss_scale is not None or train.on_nonfinite == "skip":
            row["skipped"] = result.num_skipped
        return row | self.more


class Metrics(Hook):
    """Writes one row per step: step, loss, grad_norm, lr, tokens, tokens_per_second, step_seconds,
    memory_bytes, time, and validation_loss where an evaluation followed, with ``validation_<name>`` of each of the
    model's ``eval_metrics``.

    A row with ``replica`` has the loss, the norm and the tokens of that replica alone, which under an inexact strategy
    waits for the others at some steps only; ``consensus_distance`` is there where the average of the replicas was made.

    Where steps can be skipped (``train.on_nonfinite = "skip"``, fp16) a row has ``skipped``, how many were so far, and
    under fp16 ``loss_scale``.

    With ``comm.accounting`` a row has ``comm``, too: axis -> ``calls`` and ``bytes`` that the logging rank sent along
    it in the step, without evaluations, as `colossus.comm.accounting` counts them.

    A row has ``checkpoint_stall_seconds`` where training has waited for checkpoints since the row before: for the copy
    in memory and for the end of the save before, or for all of a save that is not in the background.

    ``memory_bytes`` is the most that this rank has used since its process began (`PeakMemory`): of tensors on its GPU,
    or resident on the CPU. On a GPU a row has ``memory_reserved_bytes``, and where the peak of the device and the
    operations of the model are known ``mfu``, the model FLOP utilisation of all devices between 0 and 1 (of those of a
    replica, where replicas count for themselves).

    Numbers are not rounded; a loss that is not a number is written ``NaN``, as Python's json does. The row of a
    step that is evaluated waits for the evaluation; ``flush`` writes it without.

    An accelerator is not waited for: the row of a step is written when the next step is over, before an evaluation's or
    a checkpoint's end, at the end of the run and after an error. Its ``step_seconds`` are from one such moment to the
    next. A step ends, for the host, when the device is through with the one before, so they add up to the run's.

    The rows of the steps that a checkpoint has are on the disk before it is complete. A run that goes on behind step N
    keeps the rows up to N and drops those behind, which come again.

    Args:
        path: the file; rows are appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._rows: LateResults[_Row] = LateResults()
        self._train: Train | None = None
        self._timer = StepTimer()
        self._counts = False
        self._counting = ExitStack()
        self._moved: accounting.Counter | None = None
        self._warned = False
        self._stalled = 0.0
        self._utilisation = Utilisation()

    def on_train_start(self, engine: Engine) -> None:
        self._utilisation = Utilisation.of(engine)
        self._stalled = engine.checkpoints.stall_seconds
        if engine.context.is_logging_rank:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if engine.checkpoints.resumed_from is not None:
                keep_rows(self._path, engine.completed_steps)
            self._open()
            self._counts = engine.config.comm.accounting
        self._timer.start()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def on_step_start(self, engine: Engine) -> None:
        if self._counts:
            self._moved = self._counting.enter_context(accounting.count())
        self._timer.start()

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        seconds = self._timer.stop()
        self._counting.close()
        if not engine.context.is_logging_rank:
            return
        memory = peak_memory(engine.device)
        row = _Row(
            seconds,
            {
                "memory_bytes": memory.allocated,
                "time": time.time(),
                **engine.strategy.report(),
                **engine.strategy.consensus(),
            },
        )
        if memory.reserved is not None:
            row.more["memory_reserved_bytes"] = memory.reserved
        if self._moved is not None:
            row.more["comm"] = by_axis(self._moved)
        stalled, self._stalled = self._stalled, engine.checkpoints.stall_seconds
        if stalled != self._stalled:
            row.more["checkpoint_stall_seconds"] = self._stalled - stalled
        self._train = engine.config.train
        late = self._rows.add(result, row)
        self._write(but=max(late, int(evaluation_due(engine, result.step))))

    def on_eval_end(self, engine: Engine, summary: EvalSummary) -> None:
        row = self._rows.last
        if row is not None:
            row.more |= {**_of_evaluation(summary), **engine.strategy.consensus()}
        elif self._file is not None:  # of a step before the run was resumed
            os.close(self._file)
            keep_rows(self._path, summary.step, _of_evaluation(summary))
            self._open()
        self._write()

    def on_save(self, engine: Engine) -> None:
        self._write()
        if self._file is not None:
            with suppress(OSError):  # rows can be missing, and training goes on: see `_append`
                os.fsync(self._file)

    def on_train_end(self, engine: Engine) -> None:
        self._write()

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self._counting.close()
        try:
            self._write(patience=PATIENCE)
        except ValueError as second:  # what is wrong with a batch the ranks may have heard already
            if str(second) != str(error):
                raise

    def flush(self) -> None:
        """Write the rows whose numbers are there, without waiting for a device. May be called from another thread."""
        self._write(patience=0.0)

    def _write(self, *, but: int = 0, patience: float = math.inf) -> None:
        self._rows.take(self._write_row, but=but, patience=patience)

    def _write_row(self, result: StepResult, row: _Row) -> None:
        assert self._train is not None
        line = (json.dumps(row.with_numbers(result, self._train, self._utilisation)) + "\n").encode()
        if self._file is not None:
            self._append(line, self._file)

    def _append(self, line: bytes, file: int) -> None:
        """One unbuffered write: whatever happens next, the line is in the file. Training goes on without it."""
        size = os.fstat(file).st_size
        try:
            written = os.write(file, line)
            while written < len(line):  # a full disk takes a part, and tells why with the next write
                written += os.write(file, line[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(file, size)  # no half line
            if not self._warned:
                self._warned = True
                reason = error.strerror or error
                print(f"colossus: rows are missing in {self._path}: {reason}; training goes on", file=sys.stderr)
