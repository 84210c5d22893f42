"""What is wrong with a checkpoint, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used: says which one, what is wrong, and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are not as they were written. An older one beside it may be whole."""


def in_words(error: BaseException) -> str:
    """An error of the file system with its reason and its path, any other as it is."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def under_key(title: str) -> Iterator[None]:
    """Errors begin with the key that led to them."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{title}: {error}") from error
