"""System calls on files: counted, so that a process can die before each of them, and recorded, so that a disk can be
shown as a power loss may have left it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

DIED, DIED_WRITING = 77, 78
CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink")
_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*CALLS, "close")}


@contextlib.contextmanager
def watched(before: Callable[..., None], names: tuple[str, ...] = CALLS) -> Iterator[None]:
    """``before(name, *arguments)`` is called before each of these calls of this process."""

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            before(name, *args, **more)
            return _REAL[name](*args, **more)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(os, name, wrapped(name)))
        yield


@contextlib.contextmanager
def dying_before(number: int, *, half_written: bool = False) -> Iterator[None]:
    """The process ends right before the call of this number, with exit code `DIED`, or `DIED_WRITING` if it was to
    write: half of the data may be out then."""
    count = itertools.count(1)

    def before(name: str, *args: Any, **more: Any) -> None:
        if next(count) == number:
            if half_written and name == "write":
                _REAL["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
            os._exit(DIED_WRITING if name == "write" else DIED)

    with watched(before):
        yield


@dataclass(eq=False)
class _File:
    data: bytes = b""
    flushed: bytes = b""
    written_at: int = 0


@dataclass(eq=False)
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    flushed: dict[str, _File | _Folder] = field(default_factory=dict)
    #: names as they were after each change since the last flush
    pending: list[dict[str, _File | _Folder]] = field(default_factory=list)

    def change(self, **names: _File | _Folder | None) -> None:
        for name, entry in names.items():
            if entry is None:
                del self.entries[name]
            else:
                self.entries[name] = entry
        self.pending.append(dict(self.entries))


class RecordedDisk:
    """What a folder holds in memory and on the disk, from the calls that were made.

    The model is a journaling file system's (ext4, xfs, btrfs): the names of one folder change in order, whatever is
    flushed; folders do not wait for each other, nor data for names; only fsync makes sure. Data that was not flushed is
    there, or half of it, or none.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._root = _Folder()
        self._open: dict[int, _File | _Folder] = {}
        self._now = 0
        self.num_calls = 0

    @contextlib.contextmanager
    def recording(self, after: Callable[[], None]) -> Iterator[None]:
        """``after`` is called after each call that changes anything."""

        def wrapped(name: str) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                result = _REAL[name](*args, **more)
                if self._note(name, result, *args, **more):
                    self.num_calls += 1
                    after()
                return result

            return call

        with contextlib.ExitStack() as stack:
            for name in (*CALLS, "close"):
                stack.enter_context(mock.patch.object(os, name, wrapped(name)))
            yield

    def _note(self, name: str, result: Any, *args: Any, **more: Any) -> bool:
        self._now += 1
        match name:
            case "open":
                return self._note_open(result, *args, **more)
            case "close":
                self._open.pop(args[0], None)
                return False
            case "write":
                file = self._open.get(args[0])
                if isinstance(file, _File):
                    file.data += bytes(args[1])[:result]
                    file.written_at = self._now
                return file is not None
            case "fsync":
                entry = self._open.get(args[0])
                if isinstance(entry, _File):
                    entry.flushed = entry.data
                elif entry is not None:
                    entry.flushed, entry.pending = dict(entry.entries), []
                return entry is not None
        found = self._find(args[0], more.get("dir_fd"))
        if found is None:
            return False
        parent, last = found
        if name == "mkdir":
            parent.change(**{last: _Folder()})
        elif name in ("rmdir", "unlink"):
            parent.change(**{last: None})
        else:
            target = self._find(args[1], None)
            assert target is not None
            assert target[0] is parent
            parent.change(**{last: None, target[1]: parent.entries[last]})
        return True

    def _note_open(self, descriptor: int, path: Any, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> bool:
        found = self._find(path, dir_fd)
        if found is None:
            if Path(path) == self._base:
                self._open[descriptor] = self._root
            return False
        parent, last = found
        is_new = last not in parent.entries
        if is_new:
            parent.change(**{last: _File()})
        entry = self._open[descriptor] = parent.entries[last]
        if flags & os.O_TRUNC and isinstance(entry, _File) and not is_new:
            entry.data, entry.flushed = b"", b""  # at once, to be sure
            return True
        return is_new

    def _find(self, path: Any, dir_fd: int | None) -> tuple[_Folder, str] | None:
        """The folder and the name in it."""
        if dir_fd is not None:
            parent = self._open.get(dir_fd)
            return (parent, str(path)) if isinstance(parent, _Folder) else None
        path = Path(path)
        if self._base not in path.parents:
            return None
        folder: Any = self._root
        *above, last = path.relative_to(self._base).parts
        for name in above:
            folder = folder.entries[name]
        return folder, last

    def after_power_loss(self, into: Path, choose: random.Random | None, keep: float) -> None:
        """Write what the disk may hold to a new folder.

        Args:
            keep: 0: what was flushed and no more; 1: all; else ``choose`` draws what else is there.
        """
        into.mkdir()
        self._write(self._root, into, choose, keep)

    def _write(self, folder: _Folder, into: Path, choose: random.Random | None, keep: float) -> None:
        states = [folder.flushed, *folder.pending]
        for name, entry in _chosen(states, choose, keep).items():
            if isinstance(entry, _Folder):
                (into / name).mkdir()
                self._write(entry, into / name, choose, keep)
                continue
            halves = [entry.flushed, entry.data[: (len(entry.flushed) + len(entry.data)) // 2], entry.data]
            (into / name).write_bytes(_chosen(halves if entry.data != entry.flushed else [entry.data], choose, keep))
            os.utime(into / name, (1e9 + entry.written_at, 1e9 + entry.written_at))


def _chosen(states: list[Any], choose: random.Random | None, keep: float) -> Any:
    return states[0] if keep == 0 else states[-1] if keep == 1 or choose is None else choose.choice(states)
