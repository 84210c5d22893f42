"""Files through which the ranks of a node and their launcher tell each other things. No torch.

A rank leaves a file when it has come to the end of its program, since an exit code of 0 does not say so:
``os._exit(0)`` in a model or a library ends a rank as if all were well. A rank that was told to stop and still works,
on a step or a checkpoint, gives signs of life. The launcher says when there is nothing left to wait for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "COLOSSUS_RANK_FILES"


@contextmanager
def made() -> Iterator[RankFiles]:
    """For the ranks that a launcher starts inside; the folder is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="colossus-ranks-") as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield RankFiles(Path(folder))
        finally:
            os.environ.pop(_VARIABLE, None)


def of_this_rank() -> RankFiles:
    """Those of the launcher that has started this process; without one nothing is written or found."""
    folder = os.environ.get(_VARIABLE)
    return RankFiles(Path(folder or os.devnull))


class RankFiles:
    """In one folder; each call may be made when the other side is gone already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- of a rank ----------------------------------------------------------------------------------------

    def finish(self, rank: int, code: int) -> None:
        """This rank has come to its end, and is about to exit with this code."""
        with contextlib.suppress(OSError):
            (self.folder / f"{rank}.finished").write_text(f"{code}\n")

    def beat(self, rank: int) -> None:
        """This rank was told to stop and may still take its time."""
        with contextlib.suppress(OSError):
            (self.folder / f"{rank}.beat").touch()

    def is_hurried(self) -> bool:
        return (self.folder / "hurry").exists()

    def remove(self) -> None:
        """The launcher was killed, and nobody else will."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- of the launcher ----------------------------------------------------------------------------------

    def finished_code(self, rank: int) -> int | None:
        """The exit code that a rank has announced which came to its end; None of another."""
        with contextlib.suppress(OSError):
            text = (self.folder / f"{rank}.finished").read_text()
            return int(text) if text.endswith("\n") else None
        return None

    def last_beat(self, rank: int) -> int | None:
        """A number that another sign of life of this rank changes; None before the first."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{rank}.beat").stat().st_mtime_ns
        return None

    def hurry(self) -> None:
        """Tell the ranks that what they would save can never be complete, or that nobody wants it."""
        with contextlib.suppress(OSError):
            (self.folder / "hurry").touch()
