"""Files of JSON lines, plain or compressed. No torch."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from colossus.data.documents.row_source import (
    BadRow,
    FileSource,
    Piece,
    Row,
    library,
)

#: bytes of a piece of a plain file, and the most pieces of one
PIECE_BYTES, _PIECES = 1 << 22, 1024


class Jsonl(FileSource):
    """Files with a JSON object in each line; ``.gz`` and ``.zst`` (library zstandard) are decompressed.

    Lines of white space alone are no rows. A plain file is read in pieces, a compressed one as a whole.

    Args:
        path: a file, a pattern such as ``"chats/**/*.jsonl"``, or a list of these.

    Raises:
        ValueError: if there is no such file, or a library is missing.
    """

    def __init__(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        super().__init__(path)
        if any(file.suffix == ".zst" for file in self.files):
            library("zstandard", "Jsonl")

    def pieces(self) -> list[Piece]:
        pieces = []
        for file in self.files:
            size = file.stat().st_size
            pieces += [Piece(str(file), 0, size)] if _is_compressed(file) else _cut_at_lines(file, size)
        return pieces

    def read(self, piece: Piece) -> Iterator[tuple[int, Row | BadRow]]:
        for number, line in enumerate(_lines(piece), start=piece.line):
            if not line.isspace():
                yield number, _parsed(line)


def _parsed(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line)
    except ValueError as error:  # also bytes that are no UTF-8
        return BadRow("broken", f"it is no JSON ({error}): {line[:80]!r}")
    except RecursionError:
        return BadRow("broken", "its JSON is nested too deeply")
    return row if isinstance(row, dict) else BadRow("broken", f"it is no JSON object: {line[:80]!r}")


def _is_compressed(file: Path) -> bool:
    return file.suffix in (".gz", ".zst")


def _lines(piece: Piece) -> Iterator[bytes]:
    """Yield the lines of a piece of a plain file, or of a compressed file.

    Raises:
        ValueError: if a compressed file is damaged or cut off.
    """
    file = Path(piece.title)
    if not _is_compressed(file):
        with file.open("rb") as lines:
            lines.seek(piece.start)
            remaining = piece.stop - piece.start
            while remaining > 0 and (line := lines.readline()):
                remaining -= len(line)
                yield line
        return
    number = 0
    damage: tuple[type[Exception], ...] = OSError, EOFError, zlib.error
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as lines:
                for number, line in enumerate(lines, start=1):  # noqa: B007
                    yield line
        else:
            zstandard = library("zstandard", "Jsonl")
            damage = (*damage, zstandard.ZstdError)
            with file.open("rb") as content:
                reader = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
                for number, line in enumerate(io.BufferedReader(reader, 1 << 20), start=1):  # noqa: B007
                    yield line
    except damage as error:
        raise ValueError(f"{file} is damaged or cut off behind its line {number:,}: {error}") from None


def _cut_at_lines(file: Path, size: int) -> list[Piece]:
    """Return pieces of a plain file that begin at lines, with the numbers of these."""
    pieces, start, line = [], 0, 1
    with file.open("rb") as content:
        while start < size:
            content.seek(start)
            block = content.read(max(PIECE_BYTES, size // _PIECES)) + content.readline()
            pieces.append(Piece(str(file), start, start + len(block), line))
            start += len(block)
            line += block.count(b"\n")
    return pieces
