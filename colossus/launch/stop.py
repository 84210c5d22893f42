"""Signals become one clean stop, and the end of the process when that stop does not come in time.

A rank that waits inside a collective runs no Python, so an ordinary signal handler would never be called
there. The C handler of CPython, however, always writes the signal's number to the wake-up pipe; a thread
reads it and can act while the main thread is blocked.
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

GRACE_SECONDS = 4.0
"""How long a rank may take from a signal to the end of its current step. All ranks are gone within 5 s."""

FINAL_CALLS_SECONDS = 0.3
"""How long the calls before the hard end (a failure record, metrics) may take."""

LAUNCHER_PID = "COLOSSUS_LAUNCHER_PID"
"""Environment variable with the process id of our launcher, which its workers must not outlive."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_code(signum: int) -> int:
    """The shell's convention: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + signum


class StopSignals:
    """Listens for SIGINT, SIGTERM and SIGHUP in a worker; the first one counts, repetitions change nothing.

    Until ``ready`` is called there is nothing to stop cleanly, and a signal ends the process at once.

    Args:
        grace_seconds: time between the signal and the hard end.
        parent: pid of the launcher; when this process outlives it, that counts as SIGTERM.
        when_orphaned: called then, from another thread.
    """

    def __init__(
        self,
        grace_seconds: float = GRACE_SECONDS,
        parent: int | None = None,
        when_orphaned: Callable[[], None] = lambda: None,
    ) -> None:
        self.received: int | None = None
        self._grace = grace_seconds
        self._parent, self._when_orphaned = parent, when_orphaned
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

    def ready(self, request_stop: Callable[[int], None]) -> None:
        """From now on a signal calls ``request_stop(signum)`` (from another thread) and starts the grace period."""
        self._request_stop = request_stop

    def is_orphaned(self) -> bool:
        """Whether the launcher has gone."""
        return self._parent is not None and os.getppid() != self._parent

    def before_hard_end(self, call: Callable[[], None]) -> None:
        """Call this, from another thread, when the grace period is over, before the process is ended."""
        self._final_calls.append(call)

    def _watch(self) -> None:
        deadline = math.inf
        while True:
            wait = max(0.0, min(0.5, deadline - time.monotonic()))
            readable, _, _ = select.select([self._read], [], [], wait)
            signals = [number for number in os.read(self._read, 64) if number in STOP_SIGNALS] if readable else []
            if not signals and self.received is None and self.is_orphaned():
                signals = [signal.SIGTERM]
                self._when_orphaned()
            if signals and self.received is None:
                self.received = int(signals[0])
                deadline = time.monotonic() + (self._grace if self._request_stop else 0.0)
                if self._request_stop is not None:
                    self._request_stop(self.received)
            if time.monotonic() >= deadline:
                self._end()

    def _end(self) -> None:
        assert self.received is not None
        # in a thread of their own: they may need a lock that the stuck thread holds
        thread = threading.Thread(target=self._run_final_calls, daemon=True)
        thread.start()
        thread.join(FINAL_CALLS_SECONDS)
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
                signal.signal(signum, signal.SIG_DFL)


def _only_wake_up(signum: int, frame: object) -> None:
    """Installed so that the signal is caught at all; the pipe does the work."""
