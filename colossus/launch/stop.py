"""Stop signals in a rank, which become one clean stop, or end the process where that stop does not come in time.

A rank that waits inside a collective runs no Python, so an ordinary signal handler would not be called there. But the C
handler of CPython always writes the signal's number to the wake-up pipe. A thread reads it and can act while the main
thread is blocked.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from colossus.launch.ends import GRACE_SECONDS, STOP_SIGNALS, exit_code
from colossus.launch.local_processes import RankFiles

#: the longest time of the calls before the hard end (the rank's end, metrics)
FINAL_CALLS_SECONDS = 0.3

_LOOK_SECONDS = 0.5

#: the environment variable with the process id of our launcher, which its workers must not outlive
LAUNCHER_PID = "COLOSSUS_LAUNCHER_PID"


class StopSignals:
    """The stop signals of a worker. The first of `STOP_SIGNALS` counts; repetitions change nothing.

    Before `ready` a run cannot stop cleanly, so a signal ends the process at once; so does ``ready`` where the launcher
    has gone meanwhile. After a signal the process has the grace period until it is ended. Where the run saves
    checkpoints, the period begins again with each `progress`, unless the launcher has called `RankFiles.hurry`.

    Args:
        rank: the global rank.
        parent: the process id of the launcher, whose end counts as SIGTERM; None without a launcher.
        files: the files through which launcher and rank communicate.

    Attributes:
        received: the signal that has come, or None.
        grace_seconds: the grace period.
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
            # a hang-up that is ignored (under nohup) must stay so
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _only_wake_up)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._reset_in_child)
        threading.Thread(target=self._watch, name="colossus-stop", daemon=True).start()

    def ready(self, request_stop: Callable[[int], None], patience_seconds: float | None = None) -> None:
        """Make signals call ``request_stop(signum)`` from another thread, and start the grace period.

        Args:
            request_stop: asks for a clean stop.
            patience_seconds: a grace period that begins again with each `progress`; None: the usual one, which does
                not.
        """
        if self.is_orphaned():  # the watching thread may notice this too late
            self._files.remove()
            os._exit(exit_code(signal.SIGTERM))
        if patience_seconds is not None:
            self.grace_seconds, self._renews = patience_seconds, True
        self._request_stop = request_stop
        if self.received is not None:  # it came just now, when the thread had no function to call
            request_stop(self.received)

    def progress(self) -> None:
        """Record progress: a step has ended, or a part of a checkpoint was written. Any thread may call this."""
        self._last_progress = time.monotonic()

    def is_orphaned(self) -> bool:
        """Return whether the launcher has gone."""
        return self._parent is not None and os.getppid() != self._parent

    def before_hard_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, by another thread, after the grace period, before the process is ended."""
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
        """Return the time at which this process is ended, after a signal at ``since``."""
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
        # in a thread of their own, since they may wait for a lock of the stuck thread
        thread = threading.Thread(target=self._run_final_calls, daemon=True)
        thread.start()
        thread.join(FINAL_CALLS_SECONDS)
        if self.is_orphaned():  # again, since another rank may have written while the folder was being removed
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
                # SLURM sends its signals to all processes, which die of them by default
                is_for_rank = signum in (signal.SIGUSR1, signal.SIGUSR2)
                signal.signal(signum, signal.SIG_IGN if is_for_rank else signal.SIG_DFL)


def _only_wake_up(signum: int, frame: object) -> None:
    """Do nothing; with this handler installed, the signal's number is written to the wake-up pipe."""
