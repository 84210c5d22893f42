"""Launches inside of another command: their output goes to a file, and what they set is set back. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


@contextmanager
def output_to(path: Path, descriptors: Sequence[int] = (STANDARD_OUTPUT,)) -> Iterator[None]:
    """What this process and those that it starts write to ``descriptors`` goes to a new file."""
    _flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in descriptors}
    try:
        with path.open("wb") as file:
            for descriptor in descriptors:
                os.dup2(file.fileno(), descriptor)
        yield
    finally:
        _flush()
        for descriptor, duplicate in kept.items():
            os.dup2(duplicate, descriptor)
            os.close(duplicate)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Restores the variables that a launch sets for its workers (threads, say) before the next launch."""
    kept = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
