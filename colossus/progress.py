"""How far something slow has come, for who waits for it."""

from __future__ import annotations

import sys


def progress(text: str) -> None:
    """One line on stderr that the next one overwrites; silent when stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
