"""A folder in the memory of this host, in which the ranks of a run save checkpoints for a restart. No torch.

The launcher makes it, locks it, and removes it at its end. Its ranks remove it where the launcher was killed. After a
run that was killed as a whole, the next launcher of the same user on this host removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from colossus.checkpoint.folder import MEMORY
from colossus.config import Config

HOST_MEMORY = Path("/dev/shm")
_LOCK = "launcher.lock"


@contextmanager
def open_memory_folder(config: Config) -> Iterator[None]:
    """Make the folder for the ranks that are started inside, where the config saves checkpoints in memory."""
    if not config.checkpoint.memory_every:
        yield
        return
    prefix = f"colossus-memory-{os.getuid()}-"
    _remove_left_over(prefix)
    made = Path(tempfile.mkdtemp(prefix="colossus-new-", dir=HOST_MEMORY))  # 0700
    lock = (made / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(f"process {os.getpid()} in {os.getcwd()}\n")
    lock.flush()
    folder = made.rename(made.with_name(made.name.replace("colossus-new-", prefix)))
    before = os.environ.get(MEMORY)
    os.environ[MEMORY] = str(folder)
    try:
        yield
    finally:
        del os.environ[MEMORY]
        if before is not None:
            os.environ[MEMORY] = before
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_memory() -> None:
    """Remove the folder; for a rank whose launcher was killed."""
    if folder := os.environ.get(MEMORY):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_over(prefix: str) -> None:
    for folder in HOST_MEMORY.glob(f"{prefix}*"):
        # anybody may make such a name here, and a link from it to anywhere
        with suppress(OSError), _open_own(folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _open_own(folder: Path) -> TextIO:
    """Open the lock of a folder, which has it before it has its name; one that was left of a removal gets another.

    Raises:
        OSError: the folder is a link or of another user, or its lock is a link.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    return os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
