"""A save under way, and its result."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: seconds between two signs of life of a rank that waits for others
_SIGN_EVERY = 1.0


@dataclass(frozen=True)
class SavedCheckpoint:
    """The result of a save.

    Attributes:
        path: folder of the checkpoint.
        step: optimizer steps done.
        num_bytes: bytes of all ranks' files.
        stall_seconds: time that this rank's training waited.
        seconds: time from the call to the complete checkpoint.
    """

    path: Path
    step: int
    num_bytes: int
    stall_seconds: float
    seconds: float


class Save:
    """A save under way."""

    def __init__(self, path: Path, step: int, on_progress: Callable[[], None]) -> None:
        self._path, self._step, self._on_progress = path, step, on_progress
        self._began = time.perf_counter()
        self._stall_seconds, self._seconds, self._num_bytes = 0.0, 0.0, 0
        self._error: Exception | None = None
        self._done = threading.Event()
        #: set once the training thread has returned, which the writing one must not hold up
        self._may_write = threading.Event()
        #: whether the rank's part is written, so that it waits for others and is not stuck
        self._has_written = False
        self._is_reported = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> SavedCheckpoint:
        """Wait for the end of the save, and return its result.

        Raises:
            CheckpointError: on all ranks, if it failed on any: which one, and why.
        """
        self.wait_until_done()
        self._is_reported = True
        if self._error is not None:
            raise self._error
        return SavedCheckpoint(self._path, self._step, self._num_bytes, self._stall_seconds, self._seconds)

    def wait_until_done(self, seconds: float = math.inf) -> None:
        """Wait for the end of the save, whether it fails or not, for at most this time."""
        deadline = time.monotonic() + seconds
        while not self._done.wait(min(_SIGN_EVERY, seconds)) and time.monotonic() < deadline:
            if self._has_written:
                self._on_progress()
