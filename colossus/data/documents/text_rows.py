"""Files as documents: those of a folder, and the source of Python's standard library."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from colossus.config.user_path import user_path
from colossus.data.documents.row_source import (
    BadRow,
    Piece,
    Row,
    RowSource,
    fingerprint_of,
    fingerprint_of_files,
    rows_in_ranges,
)
from colossus.data.text import stdlib_files

#: files in a piece
_PIECE_FILES = 256


class _Files(RowSource):
    """Files, each of which is a row ``{"text": .., "path": ..}``; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, name: str, files: Sequence[tuple[str, Path, int]]) -> None:
        size = sum(size for _, _, size in files)
        self.name = f"{name} ({len(files):,} files, {size:,} bytes)"
        self.title, self.files = name, files
        names = ((title, size) for title, _, size in files)
        self.fingerprint = fingerprint_of("files", *names, fingerprint_of_files([path for _, path, _ in files]))

    def pieces(self) -> list[Piece]:
        return rows_in_ranges(self.title, len(self.files), _PIECE_FILES)

    def read(self, piece: Piece) -> Iterator[tuple[int, Row | BadRow]]:
        for number, (title, path, size) in enumerate(self.files[piece.start : piece.stop], start=piece.line):
            yield number, {"text": path.read_bytes()[:size].decode("utf-8", "replace"), "path": title}

    def place(self, title: str, line: int) -> str:
        return f"{title}, file {self.files[line - 1][0]}"


class TextFiles(_Files):
    """All files of a folder that match a pattern, in the order of their relative paths, each a document.

    Args:
        path: the folder; ``~`` is expanded.
        pattern: pattern of file names, as in `pathlib.Path.glob`.

    Raises:
        ValueError: if there is no such folder, or no file that matches.
    """

    def __init__(self, path: str | os.PathLike[str], pattern: str = "**/*.txt") -> None:
        root = user_path(path)
        if not root.is_dir():
            what = "is a file, not a folder" if root.exists() else "does not exist"
            raise ValueError(f"TextFiles: {os.fspath(path)!r} {what} (looked from {os.getcwd()})")
        names = sorted((file.relative_to(root).as_posix(), file) for file in root.glob(pattern) if file.is_file())
        if not names:
            raise ValueError(f"TextFiles: no file in {os.fspath(path)!r} matches {pattern!r}; set pattern")
        super().__init__(f"TextFiles {os.fspath(path)}", [(name, file, file.stat().st_size) for name, file in names])


class StdlibFiles(_Files):
    """The source files of the running Python's standard library, each a document; see `PythonStdlib`.

    Args:
        max_bytes: bytes of all documents together.

    Raises:
        ValueError: if this Python has no readable sources.
    """

    def __init__(self, max_bytes: int = 8_000_000) -> None:
        super().__init__("StdlibFiles", stdlib_files(max_bytes, "StdlibFiles"))
