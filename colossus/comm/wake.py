"""A pipe that wakes a thread out of its `select`."""

from __future__ import annotations

import contextlib
import os


class Wake:
    """To be watched for reading by one thread, and written to by any other."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def call(self) -> None:
        """From any thread, also after the end."""
        # it is awake already, or has ended
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._write >= 0:
                os.write(self._write, b"w")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close_reading(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def close(self) -> None:
        """When no other thread can call any more."""
        self.close_reading()
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def __del__(self) -> None:
        self.close()
