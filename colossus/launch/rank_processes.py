"""The processes of one node's ranks, which its launcher starts and ends. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from colossus.launch.ends import STOP_SIGNALS, AttemptEnd
from colossus.launch.stop import GRACE_SECONDS, RankFiles
from colossus.python_process import python_words

#: the time from the stop signal, or the last heartbeat, to SIGKILL; workers that can run end themselves before
KILL_SECONDS = GRACE_SECONDS + 0.5

#: the time after which a line tells the user what a stop waits for
SAY_SECONDS = 3.0

#: the time after which a Ctrl-C counts as a second one; a terminal sends the first to all processes
AGAIN_SECONDS = 1.0


def note_stop_signals(attempt: AttemptEnd) -> None:
    """Let stop signals only be noted in the attempt's end, since the remaining work takes no time."""

    def note(signum: int, frame: object) -> None:
        attempt.late_signum = attempt.late_signum or signum

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
        attempt: records how they end, and whether a second Ctrl-C has come.
        files: the files through which ranks and launcher communicate.

    Attributes:
        all: global rank -> its process, a `subprocess.Popen`.
    """

    def __init__(self, attempt: AttemptEnd, files: RankFiles) -> None:
        self.all: dict[int, Any] = {}
        self._attempt, self._files = attempt, files

    def running(self) -> dict[int, Any]:
        return {rank: process for rank, process in self.all.items() if rank not in self._attempt.ranks}

    def note_exits(self) -> None:
        """Record the exits of ranks that have ended by themselves."""
        for rank, process in self.running().items():
            if (code := process.poll()) is not None:
                self._attempt.ranks[rank] = replace(self._files.read_end(rank), code=code)

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
        ends, files, began = self._attempt.ranks, self._files, time.monotonic()

        def again(signum: int, frame: object) -> None:
            self._attempt.late_signum = self._attempt.late_signum or signum
            if time.monotonic() - began > AGAIN_SECONDS:
                files.hurry()
                self._attempt.is_hurried = True

        note_stop_signals(self._attempt)  # except a second Ctrl-C, after which nothing is saved
        signal.signal(signal.SIGINT, again)
        for process in running.values():
            process.send_signal(signum)
        beats: dict[int, int | None] = dict.fromkeys(running)
        deadlines = dict.fromkeys(running, began + KILL_SECONDS)
        is_saving, has_spoken = True, False
        while running := self.running():
            now = time.monotonic()
            if is_saving and not (can_save() and all(end.kind == "finished" for end in ends.values())):
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
                    code, end = process.returncode, files.read_end(rank)
                    if is_killed and end.kind == "finished" and end.code is not None:
                        code = end.code  # it had finished; only the teardown of torch, which takes seconds, was cut
                    by_another = code == -signal.SIGKILL and not is_killed
                    ends[rank] = replace(end, code=code, after_stop=not by_another)
            if is_saving and not has_spoken and now - began > SAY_SECONDS and any(beats[rank] for rank in running):
                has_spoken = True
                text = "waiting for the running step to end and its checkpoint to be saved (Ctrl-C again: do not wait)"
                print(f"colossus: {text}", file=sys.stderr, flush=True)
            time.sleep(0.02)
        note_stop_signals(self._attempt)
