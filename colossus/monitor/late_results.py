"""The results of steps, each once its numbers have come from the device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
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
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[StepResult, T]] = deque()

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
        """What belongs to the last one that was not taken."""
        return self._coming[-1][1] if self._coming else None

    def take(self, *, but: int = 0, patience: float = math.inf) -> Iterator[tuple[StepResult, T]]:
        """Take them in order. May be called from another thread.

        Args:
            but: the last so many stay.
            patience: seconds to wait for each one's numbers; from the first on that do not come all stay.
        """
        while len(self._coming) > but:
            with suppress(IndexError):  # another thread has taken it
                if patience != math.inf and not _comes_in(self._coming[0][0], patience):
                    return
                yield self._coming.popleft()


def _comes_in(result: StepResult, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not result.is_there:
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
