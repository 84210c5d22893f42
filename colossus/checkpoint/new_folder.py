"""A folder that is there as a whole, or not at all. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from colossus.checkpoint.durable import flush_folder, make_folder
from colossus.checkpoint.errors import CheckpointError


def require_new(target: Path) -> None:
    """That nothing is there yet.

    Raises:
        CheckpointError: there is.
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: is there already; name a folder that is not, or move it away")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, beside ``target``, whose name it gets when the block ends well; else it is removed.

    Raises:
        CheckpointError: ``target`` is there, or cannot be made.
    """
    require_new(target)
    temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        make_folder(temporary)
        yield temporary
        flush_folder(temporary)
        require_new(target)
        temporary.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
