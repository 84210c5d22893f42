"""In a rank: signals become one clean stop, and the end of the process when that stop does not come in time.

A rank that waits inside a collective runs no Python, so an ordinary signal handler would never be called
there. The C handler of CPython, however, always writes the signal's number to the wake-up pipe; a thread
reads it and can act while the main thread is blocked.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from colossus.launch.memory_folder import remove_memory

GRACE_SECONDS = 4.0
"""How long a rank may take from a signal to the end of its current step. All ranks are gone within 5 s.

A run that saves checkpoints has ``checkpoint.grace_seconds`` instead, and again after each sign of progress.
"""

FINAL_CALLS_SECONDS = 0.3
"""How long the calls before the hard end (a failure record, metrics) may take."""

_LOOK_SECONDS = 0.5

LAUNCHER_PID = "COLOSSUS_LAUNCHER_PID"
"""Environment variable with the process id of our launcher, which its workers must not outlive."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The last two are those that SLURM is asked to send some time before a job's end (``--signal=USR1@120``)."""

_RANK_FILES = "COLOSSUS_RANK_FILES"


def exit_code(signum: int) -> int:
    """The shell's convention: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP; SLURM's signals are a SIGTERM."""
    return 128 + (signal.SIGTERM if signum in (signal.SIGUSR1, signal.SIGUSR2) else signum)


class RankFiles:
    """Files through which the ranks of a node and their launcher tell each other things, also when the other has gone.

    A rank leaves one when it has come to the end of its program, since an exit code of 0 does not say so:
    ``os._exit(0)`` in a model or a library ends a rank as if all were well. A rank that was told to stop and still
    works, on a step or a checkpoint, gives signs of life. The launcher says when there is nothing left to wait for.

    Args:
        folder: by default that of the launcher that has started this process; without one nothing is written or found.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(os.environ.get(_RANK_FILES, os.devnull))

    def finish(self, rank: int, code: int) -> None:
        """This rank has come to its end, and is about to exit with this code."""
        self._write(f"{rank}.finished", f"{code}\n")

    def beat(self, rank: int) -> None:
        """This rank was told to stop and may still take its time."""
        self._write(f"{rank}.beat")

    def hurry(self) -> None:
        """Tell the ranks that what they would save can never be complete, or that nobody wants it."""
        self._write("hurry")

    def is_hurried(self) -> bool:
        return (self.folder / "hurry").exists()

    def finished_code(self, rank: int) -> int | None:
        """The exit code that a rank has announced which came to its end; None of another."""
        with contextlib.suppress(OSError):
            text = (self.folder / f"{rank}.finished").read_text()
            return int(text) if text.endswith("\n") else None
        return None

    def last_beat(self, rank: int) -> int | None:
        """A number that another sign of life of this rank changes; None before the first."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{rank}.beat").stat().st_mtime_ns
        return None

    def remove(self) -> None:
        """The launcher was killed, and nobody else will."""
        remove_memory()
        if self.folder.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, text: str = "") -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).write_text(text)


@contextmanager
def made_rank_files() -> Iterator[RankFiles]:
    """For the ranks that a launcher starts inside; the folder is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="colossus-ranks-") as folder:
        os.environ[_RANK_FILES] = folder
        yield RankFiles()


class StopSignals:
    """Listens for `STOP_SIGNALS` in a worker; the first one counts, repetitions change nothing.

    Until ``ready`` is called there is nothing to stop cleanly, and a signal ends the process at once; so does
    ``ready`` where the launcher has gone meanwhile. From a signal on
    the process may take the grace period until it ends; where the run saves checkpoints, the period begins anew
    with each `progress`, unless the launcher has said that there is nothing left to save.

    Args:
        parent: pid of the launcher; when this process outlives it, that counts as SIGTERM.
        files: through which launcher and rank speak.
    """

    def __init__(self, rank: int = 0, parent: int | None = None, files: RankFiles | None = None) -> None:
        self.received: int | None = None
        self.grace_seconds = GRACE_SECONDS
        self._renews = False
        self._last_progress = -math.inf
        self._rank, self._parent, self._files = rank, parent, files or RankFiles()
        self._hurried_at: float | None = None
        self._request_stop: Callable[[int], None] | None = None
        self._final_calls: list[Callable[[], None]] = []
        self._read = self._write = -1

    def install(self) -> None:
        """Take over the signals. Main thread only."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for signum in STOP_SIGNALS:
            # under nohup a hang-up must stay ignored
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _only_wake_up)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._reset_in_child)
        threading.Thread(target=self._watch, name="colossus-stop", daemon=True).start()

    def ready(self, request_stop: Callable[[int], None], patience_seconds: float | None = None) -> None:
        """From now on a signal calls ``request_stop(signum)`` (from another thread) and starts the grace period.

        Args:
            patience_seconds: instead of the grace period, and anew after each `progress`.
        """
        if self.is_orphaned():  # the thread that looks for it may come too late
            self._files.remove()
            os._exit(exit_code(signal.SIGTERM))
        if patience_seconds is not None:
            self.grace_seconds, self._renews = patience_seconds, True
        self._request_stop = request_stop
        if self.received is not None:  # just now, and the thread that hears of it has seen nobody to tell
            request_stop(self.received)

    def progress(self) -> None:
        """This rank is not stuck: a step has ended, a part of a checkpoint was written. From any thread."""
        self._last_progress = time.monotonic()

    def is_orphaned(self) -> bool:
        """Whether the launcher has gone."""
        return self._parent is not None and os.getppid() != self._parent

    def before_hard_end(self, call: Callable[[], None]) -> None:
        """Call this, from another thread, when the grace period is over, before the process is ended."""
        self._final_calls.append(call)

    def _watch(self) -> None:
        since = math.inf
        while True:
            wait = max(0.0, min(_LOOK_SECONDS, self._deadline(since) - time.monotonic()))
            readable, _, _ = select.select([self._read], [], [], wait)
            signals = [number for number in os.read(self._read, 64) if number in STOP_SIGNALS] if readable else []
            if not signals and self.received is None and self.is_orphaned():
                signals = [signal.SIGTERM]
                self._files.remove()
            if signals and self.received is None:
                self.received = int(signals[0])
                since = time.monotonic()
                if self._request_stop is not None:
                    self._request_stop(self.received)
            if self.received is None:
                continue
            if time.monotonic() >= self._deadline(since):
                self._end()
            if self._renews:
                self._files.beat(self._rank)

    def _deadline(self, since: float) -> float:
        """When this process is ended that was told to stop at ``since``."""
        if self._request_stop is None:
            return since
        if not self._renews:
            return since + self.grace_seconds
        if self._hurried_at is None and self._files.is_hurried():
            self._hurried_at = time.monotonic()
        if self._hurried_at is not None:
            return max(since, self._hurried_at) + GRACE_SECONDS
        return max(since, self._last_progress) + self.grace_seconds

    def _end(self) -> None:
        assert self.received is not None
        # in a thread of their own: they may need a lock that the stuck thread holds
        thread = threading.Thread(target=self._run_final_calls, daemon=True)
        thread.start()
        thread.join(FINAL_CALLS_SECONDS)
        if self.is_orphaned():  # once more: another rank may have written there while its folder was removed
            self._files.remove()
        os._exit(exit_code(self.received))

    def _run_final_calls(self) -> None:
        for call in self._final_calls:
            with contextlib.suppress(Exception):
                call()

    def _reset_in_child(self) -> None:
        # a forked child (a data loader's worker) must not wake its parent through the inherited pipe
        signal.set_wakeup_fd(-1)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is _only_wake_up:
                # SLURM sends its signals to all processes, and one that does not expect them dies of them
                is_for_rank = signum in (signal.SIGUSR1, signal.SIGUSR2)
                signal.signal(signum, signal.SIG_IGN if is_for_rank else signal.SIG_DFL)


def _only_wake_up(signum: int, frame: object) -> None:
    """Installed so that the signal is caught at all; the pipe does the work."""
