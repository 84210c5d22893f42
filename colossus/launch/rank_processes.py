"""The processes of one node's ranks, which elastic has started: which have ended, and how. No torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colossus.launch import finished
from colossus.launch.causes import RankExit
from colossus.launch.ending import end_processes


class RankProcesses:
    """
    Args:
        processes: global rank -> its process, as `subprocess.Popen`.
        exits: of those that have ended; what is seen of the others is noted there.
        marks: the folder in which ranks leave marks and signs of life (`finished`).
    """

    def __init__(self, processes: Mapping[int, Any], exits: dict[int, RankExit], marks: Path | None) -> None:
        self._all, self._exits, self._marks = dict(processes), exits, marks

    @property
    def ranks(self) -> list[int]:
        return list(self._all)

    def running(self) -> dict[int, Any]:
        """Those of which it is not known that they have ended."""
        return {rank: process for rank, process in self._all.items() if rank not in self._exits}

    def note_exits(self) -> None:
        """Record how those have ended that did so by themselves."""
        for rank, process in self.running().items():
            code = process.poll()
            if code is not None:
                is_finished = self._marks is None or finished.is_marked(self._marks, rank)
                stack = finished.read_stack(self._marks, rank) if self._marks is not None and code < 0 else ""
                self._exits[rank] = RankExit(code, is_finished=is_finished, stack=stack)

    def await_ends(self, seconds: float) -> None:
        """Wait until all have ended by themselves, at most this long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in self._all.values()):
                return
            time.sleep(0.02)

    def end_all(
        self,
        signum: int = signal.SIGTERM,
        *,
        has_failed: bool,
        when_hurried: Callable[[], None],
        look: Callable[[Mapping[int, RankExit]], bool],
    ) -> None:
        """End those that still run (`end_processes`), and record how each ended."""
        self.note_exits()
        processes = self.running()
        if not processes:
            return
        before = dict(self._exits)
        self._exits |= end_processes(
            processes,
            signum,
            self._marks,
            has_failed=has_failed,
            when_hurried=when_hurried,
            look=lambda exits: look({**before, **exits}),
        )
