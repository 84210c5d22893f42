"""The processes of one node's ranks, which its launcher starts and ends. No torch."""

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

#: the time from the stop signal, or the last heartbeat, to SIGKILL; workers that can run end themselves before
KILL_SECONDS = GRACE_SECONDS + 0.5

#: the time after which a line tells the user what a stop waits for
SAY_SECONDS = 3.0

#: the time after which a Ctrl-C counts as a second one; a terminal sends the first to all processes
AGAIN_SECONDS = 1.0


def note_stop_signals(outcome: Outcome) -> None:
    """Let stop signals only be noted in the outcome, since the remaining work takes no time."""

    def note(signum: int, frame: object) -> None:
        outcome.late_signum = outcome.late_signum or signum

    on_stop_signals(note)


def on_stop_signals(call: Callable[[int, Any], None]) -> None:
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, call)


def start_process(module: str, words: Sequence[str], variables: Mapping[str, str]) -> Any:
    """Start a rank with our output. Signals to our process group do not reach it or its data loaders."""
    command = python_words(module, *words)
    return subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)


class RankProcesses:
    """The processes of this node's ranks.

    Args:
        outcome: records how they end, and whether a second Ctrl-C has come.
        files: the files through which ranks and launcher communicate.

    Attributes:
        all: global rank -> its process, a `subprocess.Popen`.
    """

    def __init__(self, outcome: Outcome, files: RankFiles) -> None:
        self.all: dict[int, Any] = {}
        self._outcome, self._files = outcome, files

    def running(self) -> dict[int, Any]:
        return {rank: process for rank, process in self.all.items() if rank not in self._outcome.exits}

    def note_exits(self) -> None:
        """Record the exits of ranks that have ended by themselves."""
        for rank, process in self.running().items():
            if (code := process.poll()) is not None:
                is_finished = self._files.finished_code(rank) is not None
                self._outcome.exits[rank] = RankExit(code, is_finished=is_finished)

    def end_all(self, signum: int = signal.SIGTERM, can_save: Callable[[], bool] = lambda: True) -> None:
        """End the ranks that still run: by the signal, then by SIGKILL where a rank cannot end itself.

        Args:
            signum: the signal.
            can_save: returns whether a checkpoint can still be complete, as far as other nodes decide it; called again
                and again.
        """
        self.note_exits()
        if not (running := self.running()):
            return
        exits, files, began = self._outcome.exits, self._files, time.monotonic()

        def again(signum: int, frame: object) -> None:
            self._outcome.late_signum = self._outcome.late_signum or signum
            if time.monotonic() - began > AGAIN_SECONDS:
                files.hurry()
                self._outcome.is_hurried = True

        note_stop_signals(self._outcome)  # except a second Ctrl-C, after which nothing is saved
        signal.signal(signal.SIGINT, again)
        for process in running.values():
            process.send_signal(signum)
        beats: dict[int, int | None] = dict.fromkeys(running)
        deadlines = dict.fromkeys(running, began + KILL_SECONDS)
        is_saving, has_spoken = True, False
        while running := self.running():
            now = time.monotonic()
            if is_saving and not (can_save() and all(ended.is_finished for ended in exits.values())):
                is_saving = False
                files.hurry()
            for rank, process in running.items():
                if (beat := files.last_beat(rank)) != beats[rank]:
                    beats[rank], deadlines[rank] = beat, now + KILL_SECONDS
                is_killed = process.poll() is None and now >= deadlines[rank]
                if is_killed:  # together with its child processes
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.poll() is not None:
                    code, announced = process.returncode, files.finished_code(rank)
                    if is_killed and announced is not None:
                        code = announced  # it had finished; only the teardown of torch, which takes seconds, was cut
                    by_another = code == -signal.SIGKILL and not is_killed
                    exits[rank] = RankExit(code, not by_another, is_finished=announced is not None)
            if is_saving and not has_spoken and now - began > SAY_SECONDS and any(beats[rank] for rank in running):
                has_spoken = True
                text = "waiting for the running step to end and its checkpoint to be saved (Ctrl-C again: do not wait)"
                print(f"colossus: {text}", file=sys.stderr, flush=True)
            time.sleep(0.02)
        note_stop_signals(self._outcome)
