"""``metrics.jsonl``: one JSON object per step, written by the logging rank as soon as its numbers are there."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from colossus.comm import accounting
from colossus.config.training import Train
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, evaluation_due
from colossus.engine.results import EvalResult, StepResult
from colossus.machine import peak_resident_bytes
from colossus.monitor.mfu import Utilisation
from colossus.monitor.row_file import RowFile

T = TypeVar("T")
#: seconds that a run which has failed waits for the numbers of a step, should its device be stuck
PATIENCE = 5.0


class LateResults(Generic[T]):
    """Results with what belongs to each, in the order of their steps: a hook that shows every step waits for none.

    On the CPU a result is there when its step is over. On an accelerator its numbers travel while the next step runs,
    and it is taken after that one. Whoever uses this takes what is left at the end.
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[StepResult, T]] = deque()
        self._lock = threading.Lock()

    def add(self, result: StepResult, belongings: T) -> int:
        """Let the numbers of a step travel.

        Returns:
            How many of the last should not be taken yet: 1 on an accelerator, else 0.
        """
        is_late = result.send_to_host()
        self._coming.append((result, belongings))
        return int(is_late)

    @property
    def last(self) -> T | None:
        """What belongs to the last one; None: all are written."""
        with self._lock:
            return self._coming[-1][1] if self._coming else None

    def take(self, write: Callable[[StepResult, T], None], *, but: int = 0, patience: float = math.inf) -> None:
        """Take them in order, each once. May be called from any thread; while another one takes it waits as long.

        Args:
            write: what is done with each; its numbers are there. What it raises is raised here; the next call goes on
                behind that result.
            but: the last so many stay.
            patience: seconds to wait for each one's numbers; from the first on that do not come all stay.
        """
        if not self._lock.acquire(timeout=-1 if patience == math.inf else patience + 0.1):
            return
        try:
            while len(self._coming) > but and _comes_in(self._coming[0][0], patience):
                write(*self._coming.popleft())
        finally:
            self._lock.release()


def _comes_in(result: StepResult, seconds: float) -> bool:
    """Wait for the numbers of a step, without end or for some seconds. Returns whether they are there."""
    if seconds == math.inf:
        result.wait()
        return True
    end = time.monotonic() + seconds
    while not result.is_there:
        if time.monotonic() >= end:
            return False
        time.sleep(1e-3)
    return True


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
    above the former it is fragmentation); on the CPU the resident memory, and None. Nothing is waited for.
    """
    if device.type != "cuda":
        return peak_resident_bytes(), None
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # read once, for both
    allocated, reserved = (stats[f"{kind}_bytes"]["all"]["peak"] if stats else 0 for kind in ("allocated", "reserved"))
    return allocated, reserved


def by_axis(counter: accounting.Counter) -> dict[str, dict[str, float]]:
    """Calls and bytes sent along each axis (``data``), or tuple of axes that a collective takes as one."""
    names = sorted({axes for _, axes, _ in counter.entries})
    return {axes: {"calls": counter.calls(axes), "bytes": counter.bytes(axes)} for axes in names}


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
    experts                                     of each router by name, where there are any: `StepResult.experts`
    comm                                        with ``comm.accounting``: axis -> calls and bytes that this rank sent
    checkpoint_stall_seconds                    that training has waited for checkpoints since the row before
    =========================================== =====================================================================

    An accelerator is not waited for: the row of a step is written when the next step is over, before the end of an
    evaluation or a checkpoint, at the end of the run and after an error; its ``step_seconds`` are from one such moment
    to the next, so they add up to the run's. The row of a step that is evaluated waits for the evaluation; ``flush``
    and a stop write it without, and an evaluation that comes later completes the last row. The rows of the steps that a
    checkpoint has are on the disk before it is complete; a run that goes on behind step N keeps the rows up to N and
    drops those behind, which come again.

    All hooks of the run are asked what else a row has (`Hook.add_to_row`), and are given each row that is written
    (`Hook.on_row`), on the thread that trains.

    Args:
        path: the file; rows are appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: RowFile | None = None
        #: with the seconds of each step, and what else its row has
        self._rows: LateResults[tuple[float, dict[str, Any]]] = LateResults()
        self._train = Train()
        self._timer = StepTimer()
        self._counts = False
        self._counting = ExitStack()
        self._moved: accounting.Counter | None = None
        self._stalled = 0.0
        self._utilisation = Utilisation()
        self._hooks: Sequence[Any] = ()
        #: rows that are written and not given to the hooks yet
        self._written: deque[dict[str, Any]] = deque()

    def on_train_start(self, engine: Engine) -> None:
        self._hooks = engine.checkpoints.hooks
        self._utilisation = Utilisation.of(engine)
        self._stalled = engine.checkpoints.stall_seconds
        if engine.context.is_logging_rank:
            goes_on = engine.checkpoints.resumed_from is not None or engine.checkpoints.is_restart
            self._file = RowFile(self._path, engine.completed_steps if goes_on else None)
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
        except ValueError as second:  # what is wrong with a batch the ranks may have heard already
            if str(second) != str(error):
                raise

    def flush(self) -> None:
        """Write the rows whose numbers are there, without waiting for a device. May be called from another thread."""
        self._rows.take(self._write_row, patience=0.0)

    def _write(self, *, but: int = 0, patience: float = math.inf) -> None:
        self._rows.take(self._write_row, but=but, patience=patience)
        while self._written:
            row = self._written.popleft()
            for hook in self._hooks:
                hook.on_row(row)

    def _write_row(self, result: StepResult, belongings: tuple[float, dict[str, Any]]) -> None:
        seconds, more = belongings
        row = {key: getattr(result, key) for key in ("step", "loss", "grad_norm", "lr", "tokens")}
        row |= {"tokens_per_second": result.tokens / seconds, "step_seconds": seconds, **more}
        row |= {"experts": result.experts} if result.experts else {}
        counted = result.tokens if result.replica_tokens is None else result.replica_tokens
        mfu = self._utilisation.at(counted / seconds)
        has_scale = result.loss_scale is not None
        maybe = {"mfu": mfu, "replica": result.replica, "loss_scale": result.loss_scale}
        row |= {key: value for key, value in maybe.items() if value is not None}
        row |= {"skipped": result.num_skipped} if has_scale or self._train.on_nonfinite == "skip" else {}
        row |= {name: number for hook in self._hooks for name, number in hook.add_to_row(row).items()}
        self._written.append(row)
        if self._file is not None:
            self._file.append(row)
