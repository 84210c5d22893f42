"""The processes of one node's ranks, as its launcher sees them: started, and ended. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colossus.launch.outcome import Outcome, RankExit
from colossus.launch.stop import GRACE_SECONDS, STOP_SIGNALS, RankFiles
from colossus.python_process import python_words

KILL_SECONDS = GRACE_SECONDS + 0.5
"""From the stop signal, or the last sign of life, to SIGKILL: workers end themselves before, unless they cannot run."""

SAY_SECONDS = 3.0
"""After which a user who waits for a stop hears what it waits for."""

AGAIN_SECONDS = 1.0
"""After which another Ctrl-C is not the same one any more, which a terminal sends to all processes."""


def note_stop_signals(outcome: Outcome) -> None:
    """What is left to be done takes no time: a stop signal is only noted."""

    def note(signum: int, frame: object) -> None:
        outcome.late_signum = outcome.late_signum or signum

    on_stop_signals(note)


def on_stop_signals(call: Callable[[int, Any], None]) -> None:
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, call)


def start_process(module: str, words: Sequence[str], variables: Mapping[str, str]) -> Any:
    """Start a rank, which prints where we do. A signal to our process group does not reach it, nor its data loaders."""
    command = python_words(module, *words)
    return subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)


class RankProcesses:
    """The processes of this node's ranks: which have ended, and how; and how they are ended.

    Args:
        outcome: in which it is noted how they end, and whether a second Ctrl-C has come.

    Attributes:
        all: global rank -> its process, as `subprocess.Popen`.
    """

    def __init__(self, outcome: Outcome, files: RankFiles) -> None:
        self.all: dict[int, Any] = {}
        self._outcome, self._files = outcome, files

    def running(self) -> dict[int, Any]:
        return {rank: process for rank, process in self.all.items() if rank not in self._outcome.exits}

    def note_exits(self) -> None:
        """Record how those have ended that did so by themselves."""
        for rank, process in self.running().items():
            if (code := process.poll()) is not None:
                is_finished = self._files.finished_code(rank) is not None
                self._outcome.exits[rank] = RankExit(code, is_finished=is_finished)

    def end_all(self, signum: int = signal.SIGTERM, can_save: Callable[[], bool] = lambda: True) -> None:
        """End those that still run: the signal, then SIGKILL for those that cannot end themselves.

        Args:
            can_save: asked again and again whether a checkpoint can still be complete, as far as others than these
                ranks decide it.
        """
        self.note_exits()
        if not (left := self.running()):
            return
        exits, files, began = self._outcome.exits, self._files, time.monotonic()

        def again(signum: int, frame: object) -> None:
            self._outcome.late_signum = self._outcome.late_signum or signum
            if time.monotonic() - began > AGAIN_SECONDS:
                files.hurry()
                self._outcome.is_hurried = True

        note_stop_signals(self._outcome)  # but for a second Ctrl-C, after which nothing is saved
        signal.signal(signal.SIGINT, again)
        for process in left.values():
            process.send_signal(signum)
        beats: dict[int, int | None] = dict.fromkeys(left)
        deadlines = dict.fromkeys(left, began + KILL_SECONDS)
        is_saving, has_spoken = True, False
        while left := self.running():
            now = time.monotonic()
            if is_saving and not (can_save() and all(ended.is_finished for ended in exits.values())):
                is_saving = False
                files.hurry()
            for rank, process in left.items():
                if (beat := files.last_beat(rank)) != beats[rank]:
                    beats[rank], deadlines[rank] = beat, now + KILL_SECONDS
                is_killed = process.poll() is None and now >= deadlines[rank]
                if is_killed:  # with all processes of its own
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.poll() is not None:
                    code, announced = process.returncode, files.finished_code(rank)
                    if is_killed and announced is not None:
                        code = announced  # Python takes seconds to take torch apart: nothing is lost with it
                    by_somebody_else = code == -signal.SIGKILL and not is_killed
                    exits[rank] = RankExit(code, not by_somebody_else, is_finished=announced is not None)
            if is_saving and not has_spoken and now - began > SAY_SECONDS and any(beats[rank] for rank in left):
                has_spoken = True
                said = "waiting for the running step to end and its checkpoint to be saved (Ctrl-C again: do not wait)"
                print(f"colossus: {said}", file=sys.stderr, flush=True)
            time.sleep(0.02)
        note_stop_signals(self._outcome)
