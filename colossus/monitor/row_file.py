"""A file of rows, one JSON object a line, each with a ``step``."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from colossus.config import ConfigError


def read_rows(path: Path, *, newest_first: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, none where there is no file, without those that a killed run has left incomplete.

    Raises:
        OSError: the file cannot be read.
    """
    with suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines()
        for line in reversed(lines) if newest_first else lines:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


class RowFile:
    """A file to which rows are appended.

    If the disk does not take a row, a warning is printed once, and training continues. A file that somebody has removed
    is created again, with a warning.

    Args:
        path: path of the file.
        last_step: last step of the checkpoint of a resumed run; later rows are cut off, since the run repeats their
            steps. None keeps all.

    Raises:
        ConfigError: if the file may not be written, for example because it is another user's.
    """

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        self._path, self._has_warned = path, False
        try:
            if last_step is not None:
                _keep_rows(path, last_step)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written to: {error.strerror or error}{_whose(path)}") from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row. Its whole line is in the file when this returns."""
        try:
            if os.fstat(self._file).st_nlink == 0:
                self._create_again()
            append_whole(self._file, (json.dumps(row) + "\n").encode())
        except OSError:
            self._warn()

    def complete(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Add numbers to the last row if it is of this step; return whether they were added."""
        with suppress(OSError), self._path.open("r+b", buffering=0) as file:
            old = b"".join(file.read().splitlines(keepends=True)[-1:])
            row = json.loads(old) if old.endswith(b"\n") else {}
            if row.get("step") != step:
                return False
            new, start = (json.dumps(row | dict(numbers)) + "\n").encode(), os.fstat(file.fileno()).st_size - len(old)
            if os.pwrite(file.fileno(), new, start) == len(new):
                os.ftruncate(file.fileno(), start + len(new))
                return True
            os.pwrite(file.fileno(), old, start)
            os.ftruncate(file.fileno(), start + len(old))
        self._warn()
        return False

    def flush(self) -> None:
        """Flush the rows to the disk."""
        with suppress(OSError):
            os.fsync(self._file)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            print(
                f"colossus: rows are missing in {self._path} (is the disk full?); training continues", file=sys.stderr
            )

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _create_again(self) -> None:
        removed, self._file = self._file, self._open()
        os.close(removed)
        print(f"colossus: {self._path} was removed: a new one has the rows from here on", file=sys.stderr)


def _whose(path: Path) -> str:
    """Return a remark for an error if a file is another user's, else an empty text."""
    with suppress(OSError):
        if (owner := path.stat().st_uid) != os.getuid():
            return f" (it is of user {owner}, this run of user {os.getuid()}); move it away, or use another folder"
    return ""


def append_whole(file: int, line: bytes) -> None:
    """Append a line by one unbuffered write: all of it, or nothing if an OSError is raised."""
    size = os.fstat(file).st_size
    if os.write(file, line) != len(line):  # a full disk writes a part of it
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _keep_rows(path: Path, last_step: int) -> None:
    """Cut the file after the rows of ``last_step``, or before the first incomplete row."""
    size = 0
    with suppress(FileNotFoundError):
        with suppress(ValueError, KeyError, TypeError):
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                    break
                size += len(line)
        os.truncate(path, size)
