"""Which ranks came to the end of their program: an exit code of 0 alone does not say so.

``os._exit(0)`` in a model or a library ends a rank as if all were well. So a rank that has trained to its end
leaves a mark, and our launcher takes an exit code of 0 without one for a failure. No torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = "COLOSSUS_FINISHED_RANKS"


@contextmanager
def expected() -> Iterator[Path]:
    """A folder for the marks of the ranks that are started inside; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="colossus-finished-") as folder:
        os.environ[_FOLDER] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop(_FOLDER, None)


def mark(rank: int) -> None:
    """This rank has come to its end. Without a launcher of ours nobody asks."""
    folder = os.environ.get(_FOLDER)
    if folder:
        with contextlib.suppress(FileNotFoundError):  # the launcher is gone, and another rank has removed it
            Path(folder, str(rank)).touch()


def abandon() -> None:
    """The launcher was killed: nobody will ask, nor remove the folder."""
    folder = os.environ.get(_FOLDER)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def is_marked(folder: Path, rank: int) -> bool:
    return Path(folder, str(rank)).exists()
