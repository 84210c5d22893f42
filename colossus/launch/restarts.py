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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pydantic import TypeAdapter

from colossus.config import Config, ConfigError
from colossus.launch import failures, run_folder
from colossus.launch.outcome import Cause, Outcome, stop_code
from colossus.launch.report import FAILED, summary
from colossus.launch.resume import RunStart
from colossus.launch.run_metrics import RunMetrics
from colossus.monitor.row_file import RowFile

ROWS = "restarts.jsonl"

#: errors that are in what was saved since, or come again: why there is no restart where the config does not go back
_NEED_ROLLBACK = {
    "ReplicasDiffer": "what was saved since may differ, too; train.on_mismatch=restart goes back before it",
    "LossSpike": "the same batches would have the same loss; train.on_spike.action=rollback leaves them out",
}

_RESTART = "COLOSSUS_RESTART"
"""Environment variable with what the launcher knows of a restart, for the ranks that it starts."""


@dataclass
class History:
    """What is known of the attempts so far. The first node's is that of all: another may come later, or take its place.

    Attributes:
        number: of restarts so far; of attempts that ended because nodes have come, too.
        times: of those after a failure, in seconds since the epoch.
        errors: that ranks have raised: type, message, step.
        pending: restarts after which no rank has trained yet, and when the attempt before them began.
        rollback: `Order` of the next attempt.
        size: of the file of rows when the first of these was noted, in bytes.
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
    """Of one run, in its launcher.

    Args:
        begin: makes and locks the run folder for the first attempt.

    Attributes:
        folder: of the run, None before it is known here.
    """

    def __init__(self, config: Config, begin: Callable[[], RunStart]) -> None:
        self.folder: Path | None = None
        self._config, self._begin = config, begin
        self._resume: str | None = None
        self._locks: Sequence[TextIO] = ()
        self._history = History()
        os.environ.pop(_RESTART, None)  # of a launch around this one

    @property
    def number(self) -> int:
        return self._history.number

    def begin(self) -> RunStart:
        """Where the next attempt begins, on the first node; the folders stay locked between attempts, until `close`."""
        if self.folder is None:
            self.folder, self._resume, self._locks = self._begin()
        elif not self._locks:
            # the node that had it has gone; a file system of the network may keep its lock for minutes
            with suppress(ConfigError):
                self._locks = (run_folder.take(self.folder, None),)
        if self.number:
            failures.clear(self.folder)
        return RunStart(self.folder, self._resume, tuple(self._locks))

    def tell(self) -> Any:
        """What another node needs to know, for `hear`."""
        return _HISTORY.dump_python(self._history, mode="json"), self._resume

    def hear(self, folder: Path, told: Any) -> None:
        """Take over what the first node knows; the ranks that are started next find it."""
        self.folder, (history, self._resume) = folder, told
        self._history = _HISTORY.validate_python(history)
        if self._history.pending:
            known = {
                "restarts": self._history.pending,
                "started": self._history.started,
                "rollback": self._history.rollback,
            }
            os.environ[_RESTART] = json.dumps(known)

    def close(self) -> None:
        """The run is over."""
        known = self._history
        if self._locks and self.folder is not None and known.pending and known.size == _size_of(self.folder / ROWS):
            _write(self.folder, known.pending)
        for lock in self._locks:
            lock.close()
        os.environ.pop(_RESTART, None)

    def follow(self, outcome: Outcome, code: int) -> bool:
        """Whether another attempt follows one that has ended so; then what it starts from is ready, and printed.

        Args:
            code: the exit code that `report` gave it.
        """
        section, folder, known = self._config.launch.restarts, outcome.folder, self._history
        if section is None or not section.max or folder is None or code != FAILED:
            return False
        exits, causes = outcome.of_all_nodes()
        ends = [outcome, *outcome.others]
        server = next((end.server for end in ends if end.server is not None), None)
        was_stopped = server is None and not outcome.gone and stop_code(causes, exits) is not None
        if was_stopped or outcome.late_signum is not None or any(end.signum is not None for end in ends):
            return False
        now = time.time()
        recent = [moment for moment in known.times if section.within is None or now - moment < section.within]
        reason = self._would_come_again(causes)
        if reason is None and len(recent) >= section.max:
            reason = f"{len(recent)} of launch.restarts.max = {section.max} are used"
        if reason is not None:
            _print(f"colossus: no restart: {reason}")
            return False
        known.times = [*recent, now]
        cause = server or (summary(causes) if causes and (causes[0].is_own or not outcome.gone) else None)
        if cause is None:
            cause = f"{outcome.gone[0]} has gone" if outcome.gone else "ranks ended early"
        self._note(folder, cause.splitlines()[0], outcome.started)
        record = causes[0].record if causes else None
        if record is not None and record.rollback is not None:
            until, skip_batches = record.rollback
            known.rollback = until, skip_batches, now
        _print(f"colossus: restart {len(recent) + 1} of {section.max}: the ranks start again")
        return True

    def regroup(self, outcome: Outcome) -> None:
        """Another attempt follows one that was stopped because nodes come or leave; it does not count as a restart."""
        assert outcome.folder is not None
        cause = "a node has left" if any(end.leaves for end in outcome.others) else "more nodes are there"
        self._note(outcome.folder, cause, outcome.started)
        _print(f"colossus: {cause}: the ranks were stopped, and start again on the nodes that are there")

    def _would_come_again(self, causes: Sequence[Cause]) -> str | None:
        """Why another attempt would end as this one, in words; None where that is not known."""
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
        """What the ranks of the next attempt are to write down."""
        known, size = self._history, _size_of(folder / ROWS)
        if not known.pending or size != known.size:  # the ranks have trained, and written it down
            known.pending, known.started, known.size, known.rollback = [], started, size, None
        known.number += 1
        known.pending.append({"restart": known.number, "cause": cause, "time": time.time()})


class Order(NamedTuple):
    """What a rank is told that is started again: the newest step that it may go on from (None: any), how many batches
    it leaves out behind that (None: those up to that of the next step), and when that was decided.
    """

    until: int | None = None
    skip_batches: int | None = 0
    time: float = 0.0


def order_of_restart() -> Order | None:
    """In a rank: None where the launcher has not started it again."""
    text = os.environ.get(_RESTART)
    if text is None:
        return None
    return Order(*(json.loads(text)["rollback"] or ()))


def note_restart(folder: Path, completed_steps: int, resumed_from: Path | None) -> None:
    """In the first rank, before the first step and before rows of metrics are cut: if the launcher has started it again
    after a failure, write down and print what that has cost.
    """
    text = os.environ.get(_RESTART)
    if text is None:
        return
    known = json.loads(text)
    cost = _cost(RunMetrics(folder / run_folder.METRICS), completed_steps, known["started"])
    *failed, last = known["restarts"]
    _write(folder, [*failed, last | cost])
    again = f"{cost['steps_redone']} step(s) come again, {cost['seconds_lost']:.1f} s are lost"
    where = f"from {resumed_from}" if resumed_from is not None else "with the beginning, since nothing was saved"
    _print(f"colossus: restarted behind step {completed_steps}, {where}: {again}")


def _cost(metrics: RunMetrics, completed_steps: int, started: float) -> dict[str, Any]:
    """The step behind which the run goes on; steps that were done and come again; seconds from where the attempt that
    failed, which began at ``started``, had begun what comes again, until now.
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
