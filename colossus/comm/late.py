"""Numbers of steps that are read at once on the CPU, and one step late on an accelerator, which nothing then waits for.

All ranks read the same numbers after the same step.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


class Arriving(Protocol):
    """Numbers on their way to the host: a `colossus.comm.host_transfer.HostRead`, or the result of a step."""

    def send_to_host(self) -> bool:
        """Start their copy, if it is not; return whether it is under way, and best waited for a step later."""

    @property
    def has_arrived(self) -> bool: ...

    def wait(self) -> Any: ...


A = TypeVar("A", bound=Arriving)
T = TypeVar("T")


class Late(Generic[A, T]):
    """Numbers of steps with further data, in the order of the steps; each is taken once."""

    def __init__(self) -> None:
        self._coming: deque[tuple[A, T]] = deque()
        self._lock = threading.Lock()

    def push(self, numbers: A, data: T) -> list[tuple[A, T]]:
        """Add the numbers of a step, and return what is to be read now: on an accelerator those of the step before."""
        return self._due(but=self.add(numbers, data))

    def settle(self) -> list[tuple[A, T]]:
        """Return all that was not taken; whoever reads the last may have to wait for it."""
        return self._due(but=0)

    def clear(self) -> None:
        """Drop all that was not taken."""
        self._coming.clear()

    def _due(self, *, but: int) -> list[tuple[A, T]]:
        with self._lock:
            return [self._coming.popleft() for _ in range(len(self._coming) - but)]

    # -- for hooks that may be called from several threads

    def add(self, numbers: A, data: T) -> int:
        """Start to copy the numbers of a step to the host.

        Returns:
            How many of the last numbers should not be taken yet: 1 on an accelerator, else 0.
        """
        is_late = numbers.send_to_host()
        self._coming.append((numbers, data))
        return int(is_late)

    @property
    def last(self) -> T | None:
        """Data of the last numbers that were not taken; None if all were."""
        with self._lock:
            return self._coming[-1][1] if self._coming else None

    def take(self, use: Callable[[A, T], object], *, but: int = 0, patience: float = math.inf) -> None:
        """Take numbers in order, each once. May be called from any thread; a second thread waits for the first.

        Args:
            use: called with numbers that have arrived, and their data. What it raises is raised here; the next call
                continues after them.
            but: how many of the last are not taken.
            patience: longest wait for numbers, in seconds; those that do not arrive and all after them stay.
        """
        if not self._lock.acquire(timeout=-1 if patience == math.inf else patience + 0.1):
            return
        try:
            while len(self._coming) > but and _arrives(self._coming[0][0], patience):
                use(*self._coming.popleft())
        finally:
            self._lock.release()


def _arrives(numbers: Arriving, seconds: float) -> bool:
    """Return whether numbers arrive within some seconds."""
    if seconds == math.inf:
        numbers.wait()
        return True
    end = time.monotonic() + seconds
    while not numbers.has_arrived:
        if time.monotonic() >= end:
            return False
        time.sleep(1e-3)
    return True
