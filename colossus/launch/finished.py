"""What the ranks of a node and their launcher tell each other through files. No torch.

Which ranks came to the end of their program: an exit code of 0 alone does not say so. ``os._exit(0)`` in a model or a
library ends a rank as if all were well. So a rank that has trained to its end leaves a mark, and our launcher takes an
exit code of 0 without one for a failure.

And when a run is stopped: a rank that still has something to do, a step or a checkpoint, gives signs of life; the
launcher says when there is nothing left to wait for, since another rank has failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = "COLOSSUS_FINISHED_RANKS"
_BEAT, _HURRY, _STACK = ".beat", "hurry", ".stack"


@contextmanager
def expected() -> Iterator[Path]:
    """A folder for the marks of the ranks that are started inside; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="colossus-finished-") as folder:
        os.environ[_FOLDER] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop(_FOLDER, None)


def mark(rank: int, code: int = 0) -> None:
    """This rank has come to its end, and is about to exit with this code. Without a launcher of ours nobody asks."""
    folder = os.environ.get(_FOLDER)
    if folder:
        with contextlib.suppress(FileNotFoundError):  # the launcher is gone, and another rank has removed it
            Path(folder, str(rank)).write_text(f"{code}\n")


def abandon() -> None:
    """The launcher was killed: nobody will ask, nor remove the folder."""
    folder = os.environ.get(_FOLDER)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def is_marked(folder: Path, rank: int) -> bool:
    return Path(folder, str(rank)).exists()


def marked_code(folder: Path, rank: int) -> int | None:
    """The exit code that a rank has announced that came to its end; None of another."""
    try:
        text = Path(folder, str(rank)).read_text()
    except OSError:
        return None
    return int(text) if text.endswith("\n") else None


def beat() -> None:
    """This rank was told to stop and may still take its time."""
    folder = os.environ.get(_FOLDER)
    if folder:
        with contextlib.suppress(OSError):
            Path(folder, f"{os.environ['RANK']}{_BEAT}").touch()


def last_beat(folder: Path, rank: int) -> int | None:
    """A number that another sign of life of this rank changes; None before the first."""
    try:
        return Path(folder, f"{rank}{_BEAT}").stat().st_mtime_ns
    except OSError:
        return None


def keep_stack(rank: int) -> None:
    """Where this process dies of a signal of its own (SIGABRT, SIGSEGV, ..), its stacks are left for the launcher."""
    folder = os.environ.get(_FOLDER)
    if folder and not faulthandler.is_enabled():  # else the user wants them on the terminal
        with contextlib.suppress(OSError):
            faulthandler.enable(open(Path(folder, f"{rank}{_STACK}"), "w"))  # noqa: SIM115 (as long as the process)


def read_stack(folder: Path, rank: int) -> str:
    """What `keep_stack` has left; empty where the process did not die so."""
    try:
        return Path(folder, f"{rank}{_STACK}").read_text(errors="replace")
    except OSError:
        return ""


def hurry(folder: Path) -> None:
    """Tell the ranks that what they would save can never be complete, or that nobody wants it."""
    with contextlib.suppress(OSError):
        Path(folder, _HURRY).touch()


def is_hurried() -> bool:
    folder = os.environ.get(_FOLDER)
    return bool(folder) and Path(folder or "", _HURRY).exists()
