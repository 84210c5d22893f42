"""The progress of slow work, for its user."""

from __future__ import annotations

import sys


def progress(text: str) -> None:
    """Print one line on stderr that the next one overwrites; print nothing when stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
