"""The processes of one node's ranks: which have ended, and how; and how they are ended. No torch.

How long a rank may take after a stop signal it knows itself (`stop.StopSignals`), and it ends itself then. So the
launcher only looks whether it can: a rank that may take its time gives signs of life.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from colossus.launch.outcome import Outcome, RankExit
from colossus.launch.rank_files import RankFiles
from colossus.launch.stop import GRACE_SECONDS, STOP_SIGNALS

KILL_SECONDS = GRACE_SECONDS + 0.5
"""From the stop signal, or the last sign of life, to SIGKILL: workers end themselves before, unless they cannot run."""

SAY_SECONDS = 3.0
"""After which a user who waits for a stop hears what it waits for."""

AGAIN_SECONDS = 1.0
"""After which another Ctrl-C is not the same one any more, which a terminal sends to all processes."""

LINGER_SECONDS = 60.0
"""How long ranks may work on when others have ended, before the user hears of it: no collective would time out."""


class RankProcesses:
    """
    Args:
        processes: global rank -> its process, as `subprocess.Popen`.
        outcome: in which it is noted how they end, and whether a second Ctrl-C has come.
    """

    def __init__(self, processes: Mapping[int, Any], outcome: Outcome, files: RankFiles) -> None:
        self._all, self._outcome, self._files = dict(processes), outcome, files
        self._first_finished = 0.0
        self._has_spoken = False

    def running(self) -> dict[int, Any]:
        """Those of which it is not known that they have ended."""
        return {rank: process for rank, process in self._all.items() if rank not in self._outcome.exits}

    def note_exits(self) -> None:
        """Record how those have ended that did so by themselves."""
        for rank, process in self.running().items():
            code = process.poll()
            if code is not None:
                is_finished = self._files.finished_code(rank) is not None
                self._outcome.exits[rank] = RankExit(code, is_finished=is_finished)

    def await_ends(self, seconds: float) -> None:
        """Wait until all have ended by themselves, at most this long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self._all.values()):
            time.sleep(0.02)

    def warn_of_stragglers(self) -> None:
        """Say once which ranks do not come to their end long after others have."""
        left = [rank for rank in self._all if self._files.finished_code(rank) is None]
        if self._has_spoken or not left or len(left) == len(self._all):
            return
        self._first_finished = self._first_finished or time.monotonic()
        if time.monotonic() - self._first_finished >= LINGER_SECONDS:
            self._has_spoken = True
            noun = f"rank {left[0]} is" if len(left) == 1 else f"ranks {', '.join(map(str, left))} are"
            _say(
                f"training is over, but {noun} still at work {LINGER_SECONDS:g} s after others have ended "
                f"(a hook's on_train_end?); Ctrl-C ends the run"
            )

    def end_all(self, signum: int = signal.SIGTERM, can_save: Callable[[], bool] = lambda: True) -> None:
        """End those that still run: the signal, then SIGKILL for those that cannot end themselves.

        Args:
            can_save: asked again and again whether a checkpoint can still be complete, as far as others than these
                ranks decide it.
        """
        self.note_exits()
        exits, files = self._outcome.exits, self._files
        left = self.running()
        if not left:
            return
        with self._second_stop():
            for process in left.values():
                process.send_signal(signum)
            began = time.monotonic()
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
                    if is_killed:
                        _kill(process)
                    if process.poll() is not None:
                        exits[rank] = self._exit_after_stop(rank, process.returncode, is_killed)
                if is_saving and not has_spoken and now - began > SAY_SECONDS and any(beats[rank] for rank in left):
                    has_spoken = True
                    _say(
                        "waiting for the running step to end and its checkpoint to be saved (Ctrl-C again: do not wait)"
                    )
                time.sleep(0.02)

    def _exit_after_stop(self, rank: int, code: int, is_killed: bool) -> RankExit:
        announced = self._files.finished_code(rank)
        if is_killed and announced is not None:
            code = announced  # Python takes seconds to take torch apart on a busy machine: nothing is lost with it
        by_somebody_else = code == -signal.SIGKILL and not is_killed
        return RankExit(code, after_stop=not by_somebody_else, is_finished=announced is not None)

    @contextmanager
    def _second_stop(self) -> Iterator[None]:
        """A stop signal changes nothing any more, but for a second Ctrl-C, after which nothing is saved."""
        began = time.monotonic()

        def again(signum: int, frame: object) -> None:
            if time.monotonic() - began > AGAIN_SECONDS:
                self._files.hurry()
                self._outcome.is_hurried = True

        for number in STOP_SIGNALS:
            signal.signal(number, again if number == signal.SIGINT else signal.SIG_IGN)
        try:
            yield
        finally:
            ignore_stop_signals()


def _kill(process: Any) -> None:
    """With all processes of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ignore_stop_signals() -> None:
    """What is left to be done takes no time."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _say(text: str) -> None:
    print(f"colossus: {text}", file=sys.stderr, flush=True)
