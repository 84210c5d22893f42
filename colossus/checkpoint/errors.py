"""Errors of checkpoints, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used. It says which one, what is wrong, and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files changed since they were written. An older one beside it may be whole."""


def in_words(error: BaseException) -> str:
    """Return an error as text: one of the file system with its reason and path, any other unchanged."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def under_key(title: str) -> Iterator[None]:
    """Prefix errors in the block with the key that led to them."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{title}: {error}") from error
