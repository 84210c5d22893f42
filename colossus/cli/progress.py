"""How far a command is that reads or writes much."""

from __future__ import annotations

import sys
import time

from colossus.arithmetic import byte_count
from colossus.checkpoint.durable import BLOCK_BYTES

#: seconds between two lines of progress
_BETWEEN = 0.2


class Progress:
    """A line that says how much is done, where somebody watches."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._of_file = total, 0, 0
        self._is_shown, self._last, self._began = sys.stderr.isatty(), 0.0, time.perf_counter()

    def block(self) -> None:
        self._of_file += BLOCK_BYTES
        self._show()

    def file_done(self, num_bytes: int) -> None:
        self._done, self._of_file = self._done + num_bytes, 0
        self._show()

    def _show(self) -> None:
        now = time.perf_counter()
        if not self._is_shown or now - self._last < _BETWEEN:
            return
        self._last, done = now, min(self._done + self._of_file, self._total)
        speed = done / max(now - self._began, 1e-9)
        text = f"{byte_count(done)} of {byte_count(self._total)}, {byte_count(speed)}/s"
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._last:
            print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)
