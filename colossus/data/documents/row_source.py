"""Sources of rows: the interface, the places of rows in messages, and fingerprints of files. No torch.

A row is a mapping, such as ``{"text": ..}`` or ``{"messages": [..]}``. A source is read in pieces, each from first to
last and by any process; the order in which a model sees documents is not the source's concern.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from colossus.arithmetic import counted
from colossus.config.user_path import user_path

Row = Mapping[str, Any]

#: bytes of a file that are hashed at a time, and the most places of a file that are
_HASHED, _PLACES = 1 << 16, 64


class Piece(NamedTuple):
    """A part of a source that is read by itself.

    Attributes:
        title: file, as it is written in messages.
        start, stop: its range: bytes of a file, or numbers of rows.
        line: number of its first row or line in the file, from 1.
    """

    title: str
    start: int
    stop: int
    line: int = 1


class BadRow(ValueError):
    """A row that is no document.

    Attributes:
        kind: one of `KINDS`.
    """

    #: kinds of bad rows -> the meaning
    KINDS: ClassVar[dict[str, str]] = {
        "broken": "it cannot be read",
        "missing": "it lacks a key",
        "empty": "it has no tokens",
        "chat": "its messages are no chat, or the template refuses them",
        "spans": "the template does not tell which part of it the assistant wrote",
    }

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class RowSource(ABC):
    """Rows of files or tables.

    Attributes:
        name: name and main argument of the source, for messages.
        fingerprint: hash of the content; it changes when files do.
    """

    name: str
    fingerprint: str
    #: name of a row in places
    unit: ClassVar[str] = "line"

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Return the pieces of the source, in order. They do not depend on the number of processes."""

    @abstractmethod
    def read(self, piece: Piece) -> Iterator[tuple[int, Row | BadRow]]:
        """Yield the number of each row in its file, from 1, and the row, or why it cannot be read."""

    def place(self, title: str, line: int) -> str:
        """Return the place of a row for messages."""
        return f"{title}, {self.unit} {line:,}"

    def tree(self) -> str:
        """Return the source as a line of a printed tree."""
        return f"{self.name}, fingerprint {self.fingerprint[:12]}"


class FileSource(RowSource):
    """Rows of files.

    Args:
        path: a file, a pattern such as ``"corpus/**/*.jsonl"``, or a list of these.

    Raises:
        ValueError: if there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        title = type(self).__name__
        self.files = matching_files(path, title)
        self.name = f"{title} {of_files(self.files)}"
        self.fingerprint = fingerprint_of(title, fingerprint_of_files(self.files))


def rows_in_ranges(title: str, count: int, size: int) -> list[Piece]:
    """Return pieces of ``size`` rows of a table with ``count``."""
    return [Piece(title, start, min(start + size, count), start + 1) for start in range(0, count, size)]


def matching_files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], name: str) -> list[Path]:
    """Return the files of a path, a pattern (``*``, ``**``) or a list of these; those of a pattern sorted.

    Raises:
        ValueError: if a path or pattern has no file.
    """
    files: list[Path] = []
    for entry in path if isinstance(path, Sequence) and not isinstance(path, str) else [path]:
        pattern = os.fspath(user_path(entry))
        matches = [pattern]
        if has_magic(pattern) and not os.path.exists(pattern):
            matches = sorted(glob(pattern, recursive=True))
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            what = "is a folder, not a file: name its files by a pattern" if os.path.isdir(pattern) else "has no file"
            raise ValueError(f"{name}: {os.fspath(entry)!r} {what} (looked from {os.getcwd()})")
        files += map(Path, matches)
    return files


def fingerprint_of(*parts: object) -> str:
    """Return the hash of printable parts."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """Return the hash of the files' names, sizes and content: of a large file its content at 64 places.

    Folders above the files are not part of it, so that a copy on another machine has the same.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\x1f{size}\x1f".encode("utf-8", "surrogateescape"))
        places = range(0, size, _HASHED)
        if len(places) > _PLACES:
            places = np.linspace(0, size - _HASHED, _PLACES).astype(np.int64).tolist()
        with file.open("rb") as content:
            for place in places:
                content.seek(place)
                digest.update(content.read(_HASHED))
    return digest.hexdigest()


def of_files(files: Sequence[Path]) -> str:
    """Return the files in words: the name of one, or the number of several and their size."""
    size = sum(file.stat().st_size for file in files)
    name = str(files[0]) if len(files) == 1 else f"{counted(len(files), 'file')} from {files[0]} on"
    return f"{name} ({size:,} bytes)"


def library(name: str, user: str) -> Any:
    """Return an imported library of the extra ``data``.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ValueError(
            f"{user} needs the library {name}, which is not installed: pip install colossus[data]"
        ) from None
