"""Whether the ranks are started again after a failure, from where, and what that has cost. No torch.

The launcher decides (`Restarts`). What was lost is known when the ranks train again, so the first rank writes it down
(`note_restart`), one row in ``restarts.jsonl`` of the run folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.config import Config
from colossus.launch import failures, run_folder
from colossus.launch.outcome import Cause, Outcome, rank_causes, stop_code
from colossus.launch.report import FAILED, summary
from colossus.launch.resume import AUTO, RunStart
from colossus.launch.run_metrics import RunMetrics
from colossus.monitor.row_file import RowFile

ROWS = "restarts.jsonl"

_RESTART = "COLOSSUS_RESTART"
"""Environment variable with what the launcher knows of a restart, for the ranks that it starts."""


class Restarts:
    """Of one run, in its launcher.

    Args:
        begin: makes and locks the run folder for the first attempt.

    Attributes:
        number: of restarts so far.
    """

    def __init__(self, config: Config, begin: Callable[[], RunStart]) -> None:
        self.number = 0
        self._config, self._begin = config, begin
        self._start: RunStart | None = None
        self._resume: str | None = None
        self._times: list[float] = []
        self._errors: set[tuple[str, str, int | None]] = set()
        #: restarts after which no rank has trained yet, and when the attempt before them began
        self._pending: list[dict[str, Any]] = []
        self._started, self._size = 0.0, 0
        os.environ.pop(_RESTART, None)  # of a launch around this one

    def begin(self) -> RunStart:
        """Where the next attempt begins; the folders stay locked between attempts, until `close`."""
        if self._start is None:
            self._start = self._begin()
            return self._start
        return self._start._replace(resume=self._resume)

    def close(self) -> None:
        """The run is over."""
        if self._start is not None and self._pending and self._size == _size_of(self._start.folder / ROWS):
            _write(self._start.folder, self._pending)
        for lock in self._start.locks if self._start is not None else ():
            lock.close()
        os.environ.pop(_RESTART, None)

    def follow(self, outcome: Outcome, code: int) -> bool:
        """Whether another attempt follows one that has ended so; then what it starts from is ready, and printed.

        Args:
            code: the exit code that `report` gave it.
        """
        section, folder = self._config.launch.restarts, outcome.folder
        if section is None or not section.max or folder is None or code != FAILED:
            return False
        causes = rank_causes(failures.read_all(folder), outcome.exits)
        was_stopped = outcome.server is None and stop_code(causes, outcome.exits) is not None
        if was_stopped or outcome.signum is not None or outcome.late_signum is not None:
            return False
        now = time.monotonic()
        recent = [moment for moment in self._times if section.within is None or now - moment < section.within]
        reason = self._would_come_again(causes)
        if reason is None and len(recent) >= section.max:
            reason = f"{len(recent)} of launch.restarts.max = {section.max} are used"
        if reason is not None:
            _print(f"colossus: no restart: {reason}")
            return False
        self._times = [*recent, now]
        self.number += 1
        cause = (outcome.server or (summary(causes) if causes else "ranks ended early")).splitlines()[0]
        self._note(folder, cause, outcome.started)
        where = self._choose(folder)
        failures.clear(folder)
        _print(f"colossus: restart {len(recent) + 1} of {section.max}: the ranks start again, {where}")
        return True

    def _would_come_again(self, causes: Sequence[Cause]) -> str | None:
        """Why another attempt would end as this one, in words; None where that is not known."""
        record = causes[0].record if causes and causes[0].kind == "error" else None
        if record is None:
            return None
        if record.type == "NonFiniteGradients":
            return "the same step would have the same gradients; train.on_nonfinite=skip leaves it out"
        error = (record.type, record.message, record.step)
        if error in self._errors:
            when = f"in step {record.step}" if record.step is not None else "before the first step"
            return f"rank {causes[0].rank} has raised the same error {when} before"
        self._errors.add(error)
        return None

    def _note(self, folder: Path, cause: str, started: float) -> None:
        """Tell the ranks of the next attempt what they are to write down."""
        size = _size_of(folder / ROWS)
        if not self._pending or size != self._size:  # the ranks have trained, and written it down
            self._pending, self._started, self._size = [], started, size
        self._pending.append({"restart": self.number, "cause": cause, "time": time.time()})
        os.environ[_RESTART] = json.dumps({"restarts": self._pending, "started": self._started})

    def _choose(self, folder: Path) -> str:
        """Choose what the next attempt loads; in words."""
        assert self._start is not None
        section = self._config.checkpoint
        self._resume = self._start.resume
        if not section.every:
            return "from the beginning of this run: it saves no checkpoints (checkpoint.every)"
        try:
            found = find_latest(root_of(section.dir, folder))
        except CheckpointError:  # the ranks will say what is wrong
            found = folder
        if found is None:
            return "from the beginning of this run: no checkpoint was saved yet"
        self._resume = AUTO
        return f"from {found}"


def note_restart(folder: Path, completed_steps: int, *, is_resumed: bool) -> None:
    """In the first rank, before the first step and before rows of metrics are cut: if the launcher has started it again
    after a failure, write down and print what that has cost.

    Where the run begins anew its rows of metrics are removed: they come again.
    """
    text = os.environ.get(_RESTART)
    if text is None:
        return
    known, metrics = json.loads(text), folder / run_folder.METRICS
    cost = _cost(RunMetrics(metrics), completed_steps, known["started"])
    if not is_resumed:
        metrics.unlink(missing_ok=True)
    *failed, last = known["restarts"]
    _write(folder, [*failed, last | cost])
    again = f"{cost['steps_redone']} step(s) come again, {cost['seconds_lost']:.1f} s are lost"
    _print(f"colossus: restarted behind step {completed_steps}: {again}")


def _cost(metrics: RunMetrics, completed_steps: int, started: float) -> dict[str, Any]:
    """The step behind which the run goes on; steps that were done and come again; seconds from where the attempt that
    failed, which began at ``started``, had begun what comes again, until now."""
    since, redone = started, 0
    for row in metrics.rows:
        if row["step"] <= completed_steps:
            since = max(since, row["time"])
        else:
            since = since if redone else row["time"] - row["step_seconds"]
            redone += 1
    return {"from_step": completed_steps, "steps_redone": redone, "seconds_lost": time.time() - since}


def _write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    file = RowFile(folder / ROWS)
    for row in rows:
        file.append(row)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
