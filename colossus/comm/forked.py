"""What a forked process (a data loader's worker) must not keep of its parent: connections stay open as long as anybody
has them, and a rank that dies would not be seen to."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Closeable(Protocol):
    def close_in_child(self) -> None:
        """Close what is open, in a process in which no thread of it runs."""


_things: WeakSet[Closeable] = WeakSet()


def close_in_children(thing: Closeable) -> None:
    """Have it closed in every process that is forked from here on, as long as it lives."""
    _things.add(thing)


def _close() -> None:
    for thing in tuple(_things):
        thing.close_in_child()


os.register_at_fork(after_in_child=_close)
