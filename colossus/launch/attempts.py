"""The attempts of a run in its launcher: their history, the folders that they use, and their record. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from colossus.config import ConfigError
from colossus.launch import attempt_log, run_folder
from colossus.launch.decide import FAILED, Restart, Stop
from colossus.launch.ends import AttemptEnd
from colossus.launch.recordings import remove_recordings
from colossus.launch.report import cause_of
from colossus.launch.resume import RunStart


class Attempts:
    """The attempts of one launch, in its launcher.

    All nodes have the history of the first one, since another may take its place.

    Args:
        begin: makes and locks the run folder for the first attempt.

    Attributes:
        launch: an identifier of this launch, the same on all nodes, which its rows have.
        folder: the run folder; None before this node has it.
        history: the decisions about the attempts that have ended.
    """

    def __init__(self, begin: Callable[[], RunStart]) -> None:
        self.launch = uuid4().hex[:12]
        self.folder: Path | None = None
        self.history: list[Restart] = []
        self._begin = begin
        self._resume: str | None = None
        self._locks: Sequence[TextIO] = ()
        #: the row of the end of the attempt before, of which the first node of that attempt may have left none
        self._last_row: dict[str, Any] = {}

    @property
    def number(self) -> int:
        """The number of the next attempt, or of the one that runs."""
        return len(self.history)

    def begin(self) -> RunStart:
        """Return the start of the next attempt, on the first node; the folders stay locked until `close`.

        Raises:
            ConfigError: the folder cannot be used, or the order to go back, of a first node that has gone, cannot be
                written.
        """
        if self.folder is None:
            self.folder, self._resume, self._locks = self._begin()
        elif not self._locks:
            # the node with the lock has gone; a network file system may keep that lock for minutes
            with suppress(ConfigError):
                self._locks = (run_folder.take(self.folder, None),)
        if self._last_row and "ended" not in attempt_log.read(self.folder, self.launch).get(self.number - 1, {}):
            is_written = attempt_log.append(self.folder, self.number - 1, **self._last_row)
            if not is_written and self._last_row.get("rollback") is not None:
                raise ConfigError([_no_order(self.folder)])
        remove_recordings(self.folder)
        attempt_log.append(self.folder, self.number, launch=self.launch, began=time.time())
        return RunStart(self.folder, self._resume, tuple(self._locks))

    def shared(self) -> Any:
        """Return what other nodes must know, as `receive` takes it."""
        return [asdict(restart) for restart in self.history], self._resume, self.launch

    def receive(self, folder: Path, shared: Any) -> None:
        """Take over the folder and the history of the first node."""
        self.folder, (history, self._resume, self.launch) = folder, shared
        self.history = [Restart(**{**past, "error": past["error"] and tuple(past["error"])}) for past in history]

    def record(self, end: AttemptEnd, decision: Restart | Stop) -> Restart | Stop:
        """Record the end of an attempt; return the decision, or a stop where an order to go back cannot be written.

        Only the first node writes, and stops. The others end when it closes the rendezvous; where it has gone before it
        could write, the next first node writes or stops (`begin`).
        """
        if end.folder is None:
            return decision
        ranks = [rank.facts() for rank in end.failed]
        self._last_row = {"launch": self.launch, "cause": cause_of(end, decision), "ranks": ranks, **asdict(decision)}
        if isinstance(decision, Stop):
            self._last_row["ended"] = time.time()
        is_written = end.node not in (None, 0) or attempt_log.append(end.folder, self.number, **self._last_row)
        if isinstance(decision, Restart):
            if decision.rollback is not None and not is_written:
                return Stop(FAILED, _no_order(end.folder))
            self.history.append(decision)
        return decision

    def close(self) -> None:
        """Release the locks; the run is over."""
        for lock in self._locks:
            lock.close()


def _no_order(folder: Path) -> str:
    return f"the order to go back cannot be written to {folder / attempt_log.ROWS}: is the disk full (`df`)?"
