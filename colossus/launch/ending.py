"""Ending the ranks of a node: a signal, patience with those that save, SIGKILL for those that cannot run. No torch.

How long a rank may take it knows itself (`stop.StopSignals`), and it ends itself then. So the launcher only looks
whether it can: a rank that may take its time gives signs of life.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from colossus.launch import finished
from colossus.launch.causes import RankExit
from colossus.launch.stop import GRACE_SECONDS, STOP_SIGNALS

KILL_SECONDS = GRACE_SECONDS + 0.5
"""From the stop signal, or the last sign of life, to SIGKILL: workers end themselves before, unless they cannot run."""

SAY_SECONDS = 3.0
"""After which a user who waits for a stop hears what it waits for."""

AGAIN_SECONDS = 1.0
"""After which another Ctrl-C is not the same one any more, which a terminal sends to all processes."""


def are_finished(exits: Mapping[int, RankExit]) -> bool:
    """Whether none of these has ended before it was through."""
    return all(ended.is_finished for ended in exits.values())


def end_processes(
    processes: Mapping[int, subprocess.Popen[bytes]],
    signum: int,
    marks: Path | None,
    *,
    has_failed: bool = False,
    when_hurried: Callable[[], None] = lambda: None,
    look: Callable[[Mapping[int, RankExit]], bool] = are_finished,
) -> dict[int, RankExit]:
    """End processes that run, by rank: the signal, then SIGKILL for those that cannot end themselves.

    Args:
        marks: the folder in which ranks leave marks and signs of life (`finished`).
        has_failed: a rank has failed already: nothing that the others save can be complete.
        when_hurried: called when a second Ctrl-C has asked to end the run without a checkpoint.
        look: how ranks have ended -> whether what the others save can still be complete.
    """
    if marks is not None and has_failed:
        finished.hurry(marks)
    exits: dict[int, RankExit] = {}
    with _second_stop(marks, when_hurried):
        for process in processes.values():
            process.send_signal(signum)
        began = time.monotonic()
        beats: dict[int, int | None] = dict.fromkeys(processes)
        deadlines = dict.fromkeys(processes, began + KILL_SECONDS)
        has_spoken = False
        while left := [rank for rank in processes if rank not in exits]:
            now = time.monotonic()
            if not has_failed and not look(exits):
                has_failed = True
                if marks is not None:
                    finished.hurry(marks)
            for rank in left:
                process = processes[rank]
                if marks is not None and (beat := finished.last_beat(marks, rank)) != beats[rank]:
                    beats[rank], deadlines[rank] = beat, now + KILL_SECONDS
                was_killed_here = process.poll() is None and now >= deadlines[rank]
                if was_killed_here:
                    kill(process)
                if process.poll() is not None:
                    code, is_killed = process.returncode, process.returncode == -signal.SIGKILL and not was_killed_here
                    announced = finished.marked_code(marks, rank) if marks is not None and was_killed_here else None
                    is_finished = marks is None or finished.is_marked(marks, rank)
                    # Python takes seconds to take torch apart where the processors are busy: nothing is lost with it
                    code = code if announced is None else announced
                    exits[rank] = RankExit(code, after_stop=not is_killed, is_finished=is_finished)
            is_waiting = any(beats[rank] for rank in left) and not has_failed
            if not has_spoken and is_waiting and now - began > SAY_SECONDS:
                has_spoken = True
                print(
                    "colossus: waiting for the running step to end and its checkpoint to be saved (Ctrl-C again: do "
                    "not wait)",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(0.02)
    return exits


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all processes of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _second_stop(marks: Path | None, when_hurried: Callable[[], None]) -> Iterator[None]:
    """A stop signal changes nothing any more, but for a second Ctrl-C, after which nothing is saved."""
    began = time.monotonic()

    def again(signum: int, frame: object) -> None:
        if marks is not None and time.monotonic() - began > AGAIN_SECONDS:
            finished.hurry(marks)
            when_hurried()

    for number in STOP_SIGNALS:
        signal.signal(number, again if number == signal.SIGINT else signal.SIG_IGN)
    try:
        yield
    finally:
        ignore_stop_signals()


def ignore_stop_signals() -> None:
    """What is left to be done takes no time."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
