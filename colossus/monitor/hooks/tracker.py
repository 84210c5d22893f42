"""The base of hooks that pass the rows of metrics on, to files and to programs that track runs."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from colossus.config import Config, by_path
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.monitor.metrics import PATIENCE, Metrics

#: seconds that the end of a run waits for rows that are not passed on yet
PATIENCE_AT_END = 60.0


@dataclass(frozen=True)
class TrackedRun:
    """A run that begins or resumes.

    Attributes:
        config: config of the run.
        folder: the run folder; the working folder outside of a launch.
        name: name of the run folder, else that of the config.
        step: optimizer steps done.
        is_resumed: whether it resumes from a checkpoint, or was restarted without one. Later steps that were passed on
            are repeated then.
    """

    config: Config
    folder: Path
    name: str
    step: int
    is_resumed: bool


@dataclass(frozen=True)
class Histogram:
    """Counts of the elements of a parameter, or of its gradient, by value.

    Attributes:
        step: step of the update that followed.
        kind: ``weights`` or ``gradients``.
        name: full logical name of the parameter.
        edges: [bins + 1], ascending.
        counts: [bins].
    """

    step: int
    kind: str
    name: str
    edges: list[float]
    counts: list[int]


class Tracker(Hook):
    """A hook that passes on each row that `Metrics` has written, from the logging rank, on a thread of its own.

    Only a checkpoint waits for it, for some seconds, and the end of the run, for a minute. An error is printed once as
    a warning, and training continues. Subclasses override `start`, `write`, .., which run on that thread, one after the
    other. If `start` fails, none of the others is called.

    Attributes:
        run_id: id of this run in the other program; a resumed run continues with it.
    """

    def __init__(self) -> None:
        self.run_id: str | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    # -- for subclasses -----------------------------------------------------------------------------------

    def start(self, run: TrackedRun) -> None:
        """Begin or resume a run."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics."""

    def write_histogram(self, histogram: Histogram) -> None:
        """Pass on a histogram, if the run has the hook `colossus.monitor.hooks.histograms.Histograms`."""

    def flush(self) -> None:
        """Flush the rows before a checkpoint is saved."""

    def close(self, *, is_good: bool) -> None:
        """Close the run, which has ended well or not."""

    # -- calls of the run ---------------------------------------------------------------------------------

    def on_train_start(self, engine: Engine) -> None:
        name, checkpoints = type(self).__name__, engine.checkpoints
        if not any(isinstance(hook, Metrics) for hook in takewhile(lambda hook: hook is not self, checkpoints.hooks)):
            raise ValueError(
                f"{name} passes on the rows that Metrics writes: pass both to fit, Metrics first: "
                f"fit(engine, [Metrics(Path('metrics.jsonl')), {name}()])"
            )
        is_resumed = checkpoints.resumed_from is not None
        again = is_resumed or checkpoints.is_restart
        if is_resumed and not checkpoints.is_same_run:
            self.run_id = None  # it is the id of another run, from which this one began
        if not engine.context.is_logging_rank:
            return
        folder, config = engine.run.folder or Path(), engine.config
        run = TrackedRun(config, folder, folder.name or str(config.name), engine.completed_steps, again)
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"colossus-{name}", daemon=True)
        self._thread.start()

    def on_row(self, row: Mapping[str, Any]) -> None:
        if self._thread is not None:
            self._calls.put(lambda: self.write(row))

    def add_histogram(self, histogram: Histogram) -> None:
        """Pass a histogram on, on the logging rank."""
        if self._thread is not None:
            self._calls.put(lambda: self.write_histogram(histogram))

    def on_save(self, engine: Engine) -> None:
        if self._thread is not None:
            self._calls.put(self.flush)
            is_through = threading.Event()
            self._calls.put(is_through.set)
            is_through.wait(PATIENCE)

    def on_train_end(self, engine: Engine) -> None:
        self._end(PATIENCE_AT_END, is_good=True)

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self._end(PATIENCE, is_good=False)

    def _end(self, patience: float, *, is_good: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._calls.put(lambda: self.close(is_good=is_good))
        self._calls.put(None)
        thread.join(patience)
        if thread.is_alive():
            self._warn(f"has not taken all rows {patience:.0f} s after the end of the run")

    def _work(self, run: TrackedRun) -> None:
        try:
            self.start(run)
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")
            self._thread = None  # after the warning, since the end of the run waits for the thread
            return
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            print(
                f"colossus: {type(self).__name__}: {problem}; rows may be missing, training continues", file=sys.stderr
            )

    def state_dict(self) -> dict[str, Any]:
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.run_id = state["run_id"]


# -- names ------------------------------------------------------------------------------------------------


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by their path, ``comm.data.bytes``; lists are left out."""
    return {path: value for path, value in by_path(row) if isinstance(value, int | float)}


def charts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by the names that trackers group by: ``train/loss``, ``validation/loss``.

    Numbers of one replica alone are ``train/replica_0/loss``.
    """
    charts = {}
    for name, number in numbers_of(row).items():
        if "validation_" in name:
            charts[f"validation/{name.replace('validation_', '', 1)}"] = number
        elif "replica" in row and name in ("loss", "grad_norm", "tokens"):
            charts[f"train/replica_{row['replica']}/{name}"] = number
        elif name not in ("step", "time", "replica"):
            charts[f"train/{name}"] = number
    return charts
