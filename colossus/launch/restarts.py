"""Restarts of the ranks after a failure: the decision, the step from which they continue, and their cost. No torch.

The launcher decides (`Restarts`). The cost is known when the ranks train again, so the first rank writes it
(`record_restart`) as one row of ``restarts.jsonl`` in the run folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pydantic import TypeAdapter

from colossus.arithmetic import counted
from colossus.config import Config, ConfigError
from colossus.launch import failures, run_folder
from colossus.launch.outcome import Cause, Outcome, stop_code
from colossus.launch.report import FAILED, summary
from colossus.launch.resume import RunStart
from colossus.launch.run_metrics import RunMetrics
from colossus.monitor.row_file import RowFile

ROWS = "restarts.jsonl"

#: errors that would recur, or that a later checkpoint may contain -> the reason against a restart without rollback
_NEED_ROLLBACK = {
    "ReplicasDiffer": "checkpoints since then may differ, too; train.on_mismatch=restart goes back before it",
    "LossSpike": "the same batches would have the same loss; train.on_spike.action=rollback leaves them out",
}

#: the environment variable with the restart's facts, for the ranks that the launcher starts
_RESTART = "COLOSSUS_RESTART"


@dataclass
class History:
    """The history of a run's attempts. All nodes have that of the first one, since another may take its place.

    Attributes:
        number: the number of restarts so far, also of those because nodes have joined or left.
        times: the times of restarts after a failure, in seconds since the epoch.
        errors: the errors that ranks have raised, as (type, message, step).
        pending: the rows of restarts after which no rank has trained yet.
        started: the time at which the attempt before the pending restarts began.
        rollback: the `Order` of the next attempt, or None.
        size: the bytes of the file of rows when the first pending restart was recorded.
    """

    number: int = 0
    times: list[float] = field(default_factory=list)
    errors: list[tuple[str, str, int | None]] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    started: float = 0.0
    rollback: tuple[int, int | None, float] | None = None
    size: int = 0


_HISTORY = TypeAdapter(History)


class Restarts:
    """The restarts of one run, in its launcher.

    Args:
        config: the config of the run.
        begin: makes and locks the run folder for the first attempt.

    Attributes:
        folder: the run folder; None before this node has it.
    """

    def __init__(self, config: Config, begin: Callable[[], RunStart]) -> None:
        self.folder: Path | None = None
        self._config, self._begin = config, begin
        self._resume: str | None = None
        self._locks: Sequence[TextIO] = ()
        self._history = History()
        os.environ.pop(_RESTART, None)  # it may come from a launch around this one

    @property
    def number(self) -> int:
        return self._history.number

    def begin(self) -> RunStart:
        """Return the start of the next attempt, on the first node; the folders stay locked until `close`."""
        if self.folder is None:
            self.folder, self._resume, self._locks = self._begin()
        elif not self._locks:
            # the node with the lock has gone; a network file system may keep that lock for minutes
            with suppress(ConfigError):
                self._locks = (run_folder.take(self.folder, None),)
        if self.number:
            failures.clear(self.folder)
        return RunStart(self.folder, self._resume, tuple(self._locks))

    def history(self) -> Any:
        """Return the history for other nodes, as `receive_history` takes it."""
        return _HISTORY.dump_python(self._history, mode="json"), self._resume

    def receive_history(self, folder: Path, history_and_resume: Any) -> None:
        """Take over the first node's history, and set the environment of the ranks that are started next."""
        self.folder, (history, self._resume) = folder, history_and_resume
        self._history = _HISTORY.validate_python(history)
        if self._history.pending:
            restart = {
                "restarts": self._history.pending,
                "started": self._history.started,
                "rollback": self._history.rollback,
            }
            os.environ[_RESTART] = json.dumps(restart)

    def close(self) -> None:
        """Write pending rows, and release the locks; the run is over."""
        past = self._history
        if self._locks and self.folder is not None and past.pending and past.size == _size_of(self.folder / ROWS):
            _write(self.folder, past.pending)
        for lock in self._locks:
            lock.close()
        os.environ.pop(_RESTART, None)

    def follow(self, outcome: Outcome, code: int) -> bool:
        """Decide whether another attempt follows; if so, record it and print a line.

        Args:
            outcome: the outcome of the attempt.
            code: the exit code that `report` returned for it.
        """
        section, folder, past = self._config.launch.restarts, outcome.folder, self._history
        if section is None or not section.max or folder is None or code != FAILED:
            return False
        exits, causes = outcome.of_all_nodes()
        ends = [outcome, *outcome.others]
        server = next((end.server for end in ends if end.server is not None), None)
        was_stopped = server is None and not outcome.gone and stop_code(causes, exits) is not None
        if was_stopped or outcome.late_signum is not None or any(end.signum is not None for end in ends):
            return False
        now = time.time()
        recent = [moment for moment in past.times if section.within is None or now - moment < section.within]
        reason = self._reason_against(causes)
        if reason is None and len(recent) >= section.max:
            reason = f"{len(recent)} of launch.restarts.max = {section.max} are used"
        if reason is not None:
            _print(f"colossus: no restart: {reason}")
            return False
        past.times = [*recent, now]
        cause = server or (summary(causes) if causes and (causes[0].is_own or not outcome.gone) else None)
        if cause is None:
            cause = f"{outcome.gone[0]} has gone" if outcome.gone else "ranks ended early"
        self._note(folder, cause.splitlines()[0], outcome.started)
        record = causes[0].record if causes else None
        if record is not None and record.rollback is not None:
            until, skip_batches = record.rollback
            past.rollback = until, skip_batches, now
        _print(f"colossus: restart {len(recent) + 1} of {section.max}: the ranks start again")
        return True

    def regroup(self, outcome: Outcome) -> None:
        """Record that another attempt follows because nodes join or leave, which does not count as a restart."""
        assert outcome.folder is not None
        cause = "a node has left" if any(end.leaves for end in outcome.others) else "more nodes are there"
        self._note(outcome.folder, cause, outcome.started)
        _print(f"colossus: {cause}: the ranks were stopped, and start again on the nodes that are there")

    def _reason_against(self, causes: Sequence[Cause]) -> str | None:
        """Return why another attempt would end like this one, or None where nothing suggests it."""
        record = causes[0].record if causes and causes[0].kind == "error" else None
        if record is None:
            return None
        if record.type == "NonFiniteGradients":
            return "the same step would have the same gradients; train.on_nonfinite=skip leaves it out"
        if record.type in _NEED_ROLLBACK and record.rollback is None:
            return _NEED_ROLLBACK[record.type]
        error = (record.type, record.message, record.step)
        if error in self._history.errors:
            when = f"in step {record.step}" if record.step is not None else "before the first step"
            return f"rank {causes[0].rank} has raised the same error {when} before"
        self._history.errors.append(error)
        return None

    def _note(self, folder: Path, cause: str, started: float) -> None:
        """Add a pending restart, which the first rank of the next attempt will write."""
        past, size = self._history, _size_of(folder / ROWS)
        if not past.pending or size != past.size:  # the ranks have trained, and written the restarts before
            past.pending, past.started, past.size, past.rollback = [], started, size, None
        past.number += 1
        past.pending.append({"restart": past.number, "cause": cause, "time": time.time()})


class Order(NamedTuple):
    """The launcher's order to the ranks of a restart.

    Attributes:
        until: the newest step from which they may resume; None: any.
        skip_batches: the number of batches that they skip after it; None: those up to that of the next step.
        time: the time of the decision, in seconds since the epoch.
    """

    until: int | None = None
    skip_batches: int | None = 0
    time: float = 0.0


def order_of_restart() -> Order | None:
    """Return the order to this rank, or None where the launcher has not restarted it."""
    text = os.environ.get(_RESTART)
    if text is None:
        return None
    return Order(*(json.loads(text)["rollback"] or ()))


def record_restart(folder: Path, completed_steps: int, resumed_from: Path | None) -> None:
    """Write and print the cost of a restart, if this is one.

    The first rank calls this before its first step, and before rows of metrics are removed.

    Args:
        folder: the run folder.
        completed_steps: the step of the checkpoint from which the run resumes.
        resumed_from: that checkpoint; None where the run begins at the first step.
    """
    text = os.environ.get(_RESTART)
    if text is None:
        return
    restart = json.loads(text)
    cost = _cost(RunMetrics(folder / run_folder.METRICS), completed_steps, restart["started"])
    *failed, last = restart["restarts"]
    _write(folder, [*failed, last | cost])
    repeated = counted(cost["steps_redone"], "step")
    where = f"from {resumed_from}" if resumed_from is not None else "from the beginning, since nothing was saved"
    _print(
        f"colossus: restarted after step {completed_steps}, {where}: {repeated} to repeat, "
        f"{cost['seconds_lost']:.1f} s are lost"
    )


def _cost(metrics: RunMetrics, completed_steps: int, started: float) -> dict[str, Any]:
    """Return the cost of a restart as a part of its row.

    It has the step of the checkpoint, the number of steps that are trained again, and the seconds from the beginning of
    these steps in the failed attempt until now.

    Args:
        metrics: the metrics of the run.
        completed_steps: the step of the checkpoint.
        started: the time at which the failed attempt began.
    """
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
