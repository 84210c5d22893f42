"""Tables: parquet files, and data sets of Hugging Face's library `datasets`. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from colossus.config.user_path import user_path
from colossus.data.documents.row_source import (
    BadRow,
    FileSource,
    Piece,
    Row,
    RowSource,
    fingerprint_of,
    fingerprint_of_files,
    library,
    rows_in_ranges,
)

#: rows of a table that are read at a time, and in a piece of a data set
_AT_ONCE, _PIECE_ROWS = 256, 16_384


class Parquet(FileSource):
    """Parquet files, read by `pyarrow`; a piece is a row group.

    Args:
        path: a file, a pattern such as ``"corpus/*.parquet"``, or a list of these.

    Raises:
        ValueError: if there is no such file, it cannot be read, or the library is missing.
    """

    unit = "row"

    def __init__(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        super().__init__(path)
        library("pyarrow", "Parquet")

    def pieces(self) -> list[Piece]:
        pieces = []
        for file in self.files:
            metadata, line = _parquet(file).metadata, 1
            for group in range(metadata.num_row_groups):
                pieces.append(Piece(str(file), group, group + 1, line))
                line += metadata.row_group(group).num_rows
        return pieces

    def read(self, piece: Piece) -> Iterator[tuple[int, Row | BadRow]]:
        line = piece.line
        for batch in _parquet(Path(piece.title)).iter_batches(_AT_ONCE, row_groups=[piece.start]):
            yield from enumerate(batch.to_pylist(), start=line)
            line += batch.num_rows


def _parquet(file: Path) -> Any:
    try:
        return library("pyarrow.parquet", "Parquet").ParquetFile(file)
    except (OSError, library("pyarrow", "Parquet").ArrowInvalid) as error:
        raise ValueError(f"Parquet: {file} cannot be read: {error}") from None


class HuggingFaceDataset(RowSource):
    """A data set of the library `datasets`: the folder of its ``save_to_disk``, or the object itself.

    A data set that streams (``streaming=True``) has no numbers of rows: give it to ``data`` as it is.

    Args:
        path: a folder, or a ``datasets.Dataset``.
        split: the split, where the folder has several.

    Raises:
        ValueError: if there is no such folder or split, or the library is missing.
    """

    unit = "row"

    def __init__(self, path: Any, split: str | None = None) -> None:
        title = os.fspath(path) if isinstance(path, str | os.PathLike) else type(path).__name__
        self.name = f"HuggingFaceDataset {title}" + (f" ({split})" if split else "")
        self.rows = path
        files: list[Path] = []
        if isinstance(path, str | os.PathLike):
            folder = user_path(path)
            try:
                self.rows = library("datasets", self.name).load_from_disk(os.fspath(folder))
            except (FileNotFoundError, OSError) as error:
                raise ValueError(f"{self.name} cannot be read (looked from {os.getcwd()}): {error}") from None
            files = sorted(folder.rglob(f"{split}/*.arrow" if split and (folder / split).is_dir() else "*.arrow"))
        if isinstance(self.rows, dict):
            if split not in self.rows:
                raise ValueError(f"{self.name} has the splits {', '.join(self.rows)}: set split to one of them")
            self.rows = self.rows[split]
        if not hasattr(self.rows, "__len__") or not hasattr(self.rows, "__getitem__"):
            raise ValueError(f"{self.name} streams its rows, which have no numbers: give it to data as it is")
        # an object has a fingerprint of its own, which the folder's files do not depend on
        content = fingerprint_of_files(files) if files else getattr(self.rows, "_fingerprint", len(self.rows))
        self.fingerprint = fingerprint_of("HuggingFaceDataset", split, content)

    def pieces(self) -> list[Piece]:
        return rows_in_ranges(self.name, len(self.rows), _PIECE_ROWS)

    def read(self, piece: Piece) -> Iterator[tuple[int, Row | BadRow]]:
        for start in range(piece.start, piece.stop, _AT_ONCE):
            columns = self.rows[start : min(start + _AT_ONCE, piece.stop)]
            for number, values in enumerate(zip(*columns.values(), strict=True), start=start + 1):
                yield number, dict(zip(columns, values, strict=True))
