"""The results of steps, each once its numbers have come from the device."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from colossus.engine.results import StepResult

T = TypeVar("T")
_LOOK_SECONDS = 1e-3
#: seconds that a run which has failed waits for the numbers of a step, should its device be stuck
PATIENCE = 5.0


class LateResults(Generic[T]):
    """Results with what belongs to each, in the order of their steps: a hook that shows every step waits for none.

    On the CPU a result is there when its step is over. On an accelerator its numbers travel while the next step runs,
    and it is taken after that one. Whoever uses this takes what is left at the end.

    Several threads may take at once. Each result goes to one of them, and in order; its numbers are waited for outside
    of the lock, so a thread that waits holds up nobody.
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[StepResult, T]] = deque()
        self._lock = threading.Lock()

    def add(self, result: StepResult, belongings: T) -> int:
        """Let the numbers of a step travel.

        Returns:
            How many of the last should not be taken yet: 1 on an accelerator, else 0.
        """
        is_late = result.send_to_host()
        self._coming.append((result, belongings))
        return int(is_late)

    @property
    def last(self) -> T | None:
        """What belongs to the last one; None: all are written."""
        with self._lock:
            return self._coming[-1][1] if self._coming else None

    def take(self, write: Callable[[StepResult, T], None], *, but: int = 0, patience: float = math.inf) -> None:
        """Take them in order, each once. May be called from any thread.

        Args:
            write: what is done with each, by one thread at a time; its numbers are there. What it raises is raised
                here; the next call goes on behind that result.
            but: the last so many stay.
            patience: seconds to wait for each one's numbers; from the first on that do not come all stay.
        """
        while (head := self._head(but)) is not None:
            if not _comes_in(head[0], patience):
                return
            with self._lock:
                if self._coming and self._coming[0] is head:  # nobody else has taken it
                    write(*self._coming.popleft())

    def _head(self, but: int) -> tuple[StepResult, T] | None:
        with self._lock:
            return self._coming[0] if len(self._coming) > but else None


def _comes_in(result: StepResult, seconds: float) -> bool:
    """Wait for the numbers of a step, without end or for some seconds. Returns whether they are there."""
    if seconds == math.inf:
        result.wait()
        return True
    end = time.monotonic() + seconds
    while not result.is_there:
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
