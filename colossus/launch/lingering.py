"""Ranks that do not come to their end after others have: no collective is left that would time out. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from colossus.launch import finished
from colossus.launch.nodes import LINGER_SECONDS


class Lingering:
    """Says once which they are.

    Args:
        marks: the folder in which ranks leave marks (`finished`).
    """

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self._first_finished: float | None = None
        self._has_spoken = False

    def look(self, ranks: Sequence[int]) -> None:
        if self._has_spoken:
            return
        left = [rank for rank in ranks if not finished.is_marked(self._marks, rank)]
        if not left or len(left) == len(ranks):
            return
        now = time.monotonic()
        self._first_finished = self._first_finished or now
        if now - self._first_finished >= LINGER_SECONDS:
            self._has_spoken = True
            noun = f"rank {left[0]} is" if len(left) == 1 else f"ranks {', '.join(map(str, left))} are"
            print(
                f"colossus: training is over, but {noun} still at work {LINGER_SECONDS:g} s after others have ended "
                f"(a hook's on_train_end?); Ctrl-C ends the run",
                file=sys.stderr,
                flush=True,
            )
