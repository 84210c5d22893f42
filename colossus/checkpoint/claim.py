"""Who saves into a folder of checkpoints. No torch."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

#: (device, inode) of a lock -> who holds it here: a lock of the system is of a process, which may take it twice, and
#: loses it when it closes the file anywhere
_held: weakref.WeakValueDictionary[tuple[int, int], Claim] = weakref.WeakValueDictionary()


class Claim:
    """The word of one run that it alone saves into a folder; it ends with `release`, or with the process.

    Attributes:
        is_held: no other run saves there, nor another one of this process.
        is_of_others: another one does. Neither is true where the file system has no locks.
    """

    def __init__(self, root: Path) -> None:
        self.is_held = self.is_of_others = False
        self._descriptor: int | None = None
        self._process = os.getpid()
        path = root / ".lock"
        try:
            if self._other_here(path):
                self.is_of_others = True
                return
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process, not of what it forks
            self.is_held = True
            _held[_key(os.fstat(self._descriptor))] = self
        except BlockingIOError:
            self.is_of_others = True
            self.release()
        except OSError:
            pass

    def _other_here(self, path: Path) -> bool:
        """Whether this process holds it already; what one that it was forked from held does not count."""
        try:
            other = _held.get(_key(path.stat()))
        except FileNotFoundError:
            return False
        return other is not None and other.is_held and other._process == self._process

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self.is_held = None, False


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
