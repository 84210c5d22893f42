"""``metrics.jsonl``: one JSON object per step, written by the logging rank as soon as its numbers are there."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from colossus.comm import accounting
from colossus.config.training import Train
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, evaluation_due
from colossus.engine.results import EvalResult, StepResult
from colossus.machine import peak_resident_bytes
from colossus.monitor.late_results import PATIENCE, LateResults
from colossus.monitor.mfu import Utilisation


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


def peak_memory(device: torch.device) -> tuple[int, int | None]:
    """The most bytes of this process so far: of tensors on its GPU, and what torch's allocator had taken for them (far
    above the former it is fragmentation); on the CPU the resident memory, and None. Nothing is waited for."""
    if device.type != "cuda":
        return peak_resident_bytes(), None
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # read once, for both
    allocated, reserved = (stats[f"{kind}_bytes"]["all"]["peak"] if stats else 0 for kind in ("allocated", "reserved"))
    return allocated, reserved


def by_axis(counter: accounting.Counter) -> dict[str, dict[str, float]]:
    """Calls and bytes sent along each axis (``data``), or tuple of axes that a collective takes as one."""
    names = sorted({axes for _, axes, _ in counter.entries})
    return {axes: {"calls": counter.calls(axes), "bytes": counter.bytes(axes)} for axes in names}


def keep_rows(path: Path, last_step: int) -> None:
    """Keep the rows of steps up to ``last_step``, all or nothing at any moment. Half rows go, too."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    kept = [line for line in lines if line.endswith(b"\n") and 0 < _step_of(line) <= last_step]
    if kept == lines:
        return
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _of_evaluation(summary: EvalResult) -> dict[str, float]:
    return {"validation_loss": summary.loss, **{f"validation_{name}": mean for name, mean in summary.metrics.items()}}


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


class Metrics(Hook):
    """Writes one row per step, as soon as its numbers are there; numbers are not rounded, one that is none is ``NaN``.

    =========================================== =====================================================================
    step, loss, grad_norm, lr, tokens           of the step; the norm before clipping
    tokens_per_second, step_seconds             without evaluations
    memory_bytes, time                          the most this rank has used so far: `peak_memory`
    memory_reserved_bytes, mfu                  on a GPU; the latter where the device's peak and the model's operations
                                                are known, of all devices (of a replica's, where these count alone)
    validation_loss, validation_<name>          where an evaluation followed, also of each of ``eval_metrics``
    replica                                     the loss, norm and tokens of the row are of this replica alone
    consensus_distance                          where the average of replicas was made
    skipped, loss_scale                         steps skipped so far, where steps can be; under fp16
    comm                                        with ``comm.accounting``: axis -> calls and bytes that this rank sent
    checkpoint_stall_seconds                    that training has waited for checkpoints since the row before
    =========================================== =====================================================================

    An accelerator is not waited for: the row of a step is written when the next step is over, before the end of an
    evaluation or a checkpoint, at the end of the run and after an error; its ``step_seconds`` are from one such moment
    to the next, so they add up to the run's. The row of a step that is evaluated waits for the evaluation; ``flush``
    writes it without. The rows of the steps that a checkpoint has are on the disk before it is complete; a run that
    goes on behind step N keeps the rows up to N and drops those behind, which come again.

    Args:
        path: the file; rows are appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        #: with the seconds of each step, and what else its row has
        self._rows: LateResults[tuple[float, dict[str, Any]]] = LateResults()
        self._train = Train()
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
            self._counts, self._train = engine.config.comm.accounting, engine.config.train
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
            row[1].update(_of_evaluation(summary) | engine.strategy.consensus())
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

    def _write_row(self, result: StepResult, belongings: tuple[float, dict[str, Any]]) -> None:
        seconds, more = belongings
        row = {key: getattr(result, key) for key in ("step", "loss", "grad_norm", "lr", "tokens")}
        row |= {"tokens_per_second": result.tokens / seconds, "step_seconds": seconds, **more}
        counted = result.tokens if result.replica_tokens is None else result.replica_tokens
        mfu = self._utilisation.at(counted / seconds)
        has_scale = result.loss_scale is not None
        row |= {"mfu": mfu} if mfu is not None else {}
        row |= {"replica": result.replica} if result.replica is not None else {}
        row |= {"loss_scale": result.loss_scale} if has_scale else {}
        row |= {"skipped": result.num_skipped} if has_scale or self._train.on_nonfinite == "skip" else {}
        if self._file is not None:
            self._append((json.dumps(row) + "\n").encode(), self._file)

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
