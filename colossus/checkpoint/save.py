"""A save under way, and how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SavedCheckpoint:
    """How a save ended.

    Attributes:
        path: of the checkpoint.
        step: optimizer steps done.
        num_bytes: of all ranks' files.
        stall_seconds: that this rank's training waited.
        seconds: from the call to the complete checkpoint.
    """

    path: Path
    step: int
    num_bytes: int
    stall_seconds: float
    seconds: float


class Save:
    """A save under way."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step = path, step
        self._began = time.perf_counter()
        self._stall_seconds = self._seconds = 0.0
        self._num_bytes = 0
        self._error: BaseException | None = None
        self._done = threading.Event()
        #: whether this rank waits for its end; a rank that has not begun is then given up after its timeout, while
        #: training goes on it is not: its step may just take longer
        self.is_awaited = False
        self._is_told = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def somebody_waits(self) -> bool:
        """For its end; also an interpreter that ends waits."""
        return self.is_awaited or not threading.main_thread().is_alive()

    def ended(self) -> None:
        """Wait for its end, well or not."""
        self.is_awaited = True
        self._done.wait()

    def training_goes_on(self) -> None:
        self._stall_seconds = time.perf_counter() - self._began

    def run(self, write: Callable[[], int]) -> None:
        """Run what writes the checkpoint and returns its bytes."""
        try:
            self._num_bytes = write()
        except BaseException as error:
            self._error = error
        self._seconds = time.perf_counter() - self._began
        self._done.set()

    def wait(self) -> SavedCheckpoint:
        """Wait for its end.

        Raises:
            CheckpointError: on all ranks, when it failed on any: which one, and why.
        """
        self.ended()
        self._is_told = True
        if self._error is not None:
            raise self._error
        return SavedCheckpoint(self._path, self._step, self._num_bytes, self._stall_seconds, self._seconds)

    def untold(self) -> BaseException | None:
        """What went wrong, unless `wait` has raised it."""
        return None if self._is_told else self._error
