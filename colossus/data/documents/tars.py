"""Tar files in the form of WebDataset. No torch."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Any

from colossus.data.documents.row_source import (
    BadRow,
    FileSource,
    Piece,
    Row,
)


class WebDataset(FileSource):
    """Tar files whose members with one name up to the first dot are a row: ``a/7.txt`` and ``a/7.json``.

    A row has the members by their extensions (``txt``, ``json``), those that are JSON parsed, the others as text, or as
    bytes if they are no UTF-8, and ``__key__``, the name. A piece is a file, which may be compressed.

    Args:
        path: a file, a pattern such as ``"shards/*.tar"``, or a list of these.

    Raises:
        ValueError: if there is no such file.
    """

    unit = "row"

    def pieces(self) -> list[Piece]:
        return [Piece(str(file), 0, 1) for file in self.files]

    def read(self, piece: Piece) -> Iterator[tuple[int, Row | BadRow]]:
        number, row, problem = 0, dict[str, Any](), ""
        try:
            with tarfile.open(piece.title, "r|*") as tar:
                for member in tar:
                    folder, _, file = member.name.rpartition("/")
                    stem, _, extension = file.partition(".")
                    content = tar.extractfile(member)
                    if content is None or not extension:
                        continue
                    if (key := f"{folder}/{stem}".lstrip("/")) != row.get("__key__"):
                        if row:
                            yield number, BadRow("broken", problem) if problem else row
                        number, row, problem = number + 1, {"__key__": key}, ""
                    try:
                        row[extension] = data = content.read()
                        row[extension] = json.loads(data) if extension.endswith("json") else data.decode()
                    except ValueError as error:
                        if extension.endswith("json"):  # others are images, or other bytes
                            problem = f"its {extension} cannot be read: {error}"
        except (OSError, EOFError, tarfile.TarError) as error:
            raise ValueError(f"{piece.title} is damaged or cut off behind its row {number:,}: {error}") from None
        if row:
            yield number, BadRow("broken", problem) if problem else row
