"""A bounded log of this rank's last collectives, which is printed when something fails."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

import torch

_PACKAGE = str(Path(__file__).parent.parent)
# files that run collectives for their caller, whose line is the one to show: autograd in torch, and these of ours
_COMMON = ("comm/", "layout/", "tensor_parallel/", "sequence_parallel/", "layers/linear.py")
_BETWEEN = (str(Path(torch.__file__).parent), *(f"{_PACKAGE}/{path}" for path in _COMMON))


class Entry:
    """One collective: its name, axes, shape and dtype, the line that called it, and whether it has finished."""

    __slots__ = ("axes", "done", "dtype", "is_message", "operation", "sequence", "shape", "site", "started")

    def __init__(
        self, operation: str, axes: str, sequence: int, shape: tuple[int, ...], dtype: object, site: tuple[str, int]
    ) -> None:
        self.operation, self.axes, self.sequence = operation, axes, sequence
        self.shape, self.dtype, self.site = shape, dtype, site
        self.started = time.monotonic()
        self.done = self.is_message = False

    def __str__(self) -> str:
        state = "done" if self.done else f"WAITING for {time.monotonic() - self.started:.1f} s"
        return f"#{self.sequence} {self.operation} over {self.axes} [{self.tensor}] at {_short(self.site)}: {state}"

    @property
    def tensor(self) -> str:
        """The shape and dtype, as in ``3x4 float32``."""
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {str(self.dtype).removeprefix('torch.')}"


_entries: deque[Entry] = deque(maxlen=32)
_sequence: dict[str, int] = {}


def resize(size: int) -> None:
    """Keep the last ``size`` collectives."""
    global _entries
    _entries = deque(_entries, maxlen=size)


def record(operation: str, axes: str, shape: tuple[int, ...], dtype: object) -> Entry:
    """Log that a collective starts. Sequence numbers count per axis, so that those of two ranks can be compared."""
    number = _sequence[axes] = _sequence.get(axes, 0) + 1
    entry = Entry(operation, axes, number, shape, dtype, _call_site())
    _entries.append(entry)
    return entry


def record_message(what: str, axes: str, number: int, shape: tuple[int, ...] = (), dtype: object = "uint8") -> Entry:
    """Log that this rank waits for a message of another, which has no number among the collectives."""
    entry = Entry(what, axes, number, shape, dtype, _call_site())
    entry.is_message = True
    _entries.append(entry)
    return entry


def progress() -> list[tuple[str, int, str, str, bool]]:
    """Return the last collectives, as (axes, number, operation and tensor, line that called it, whether it is done)."""
    return [
        (entry.axes, entry.sequence, f"{entry.operation} [{entry.tensor}]", _short(entry.site), entry.done)
        for entry in _entries
        if not entry.is_message
    ]


def recent() -> list[str]:
    """Return one line per collective or message, oldest first."""
    return [str(entry) for entry in _entries]


def clear() -> None:
    _entries.clear()
    _sequence.clear()


def _call_site() -> tuple[str, int]:
    """Return file and line of the innermost frame that is outside of `_BETWEEN`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _short(site: tuple[str, int]) -> str:
    name, line = site
    if name.startswith(_PACKAGE):
        name = "colossus" + name[len(_PACKAGE) :]
    return f"{name}:{line}"
