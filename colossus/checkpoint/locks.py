"""Locks on files, which end with their process at the latest. No torch."""

from __future__ import annotations

import fcntl
from typing import Literal, Protocol

Locked = Literal["held", "others", "no locks"]


class _File(Protocol):
    def fileno(self) -> int: ...


def try_lock(file: int | _File, *, of_process: bool) -> Locked:
    """Lock an open file, if nobody else has: "held", "others" have it, or the file system has "no locks".

    Args:
        of_process: True: the lock is not of processes that are forked, and ends as soon as this one closes any
            descriptor of the file. False: it is of the open file, and ends with its last descriptor, of a fork, too.
    """
    how = fcntl.lockf if of_process else fcntl.flock
    try:
        how(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either answer
        return "others"
    except OSError:
        return "no locks"
    return "held"
