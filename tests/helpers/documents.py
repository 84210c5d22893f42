"""Documents for tests: files of rows, and token ids in memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colossus.data.documents.token_documents import TokenDocuments


class Documents(TokenDocuments):
    """Documents of given lengths; the ids of all are 0, 1, 2, ..., each once."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        super().__init__("Documents", f"documents {self.lengths}")

    def _open(self) -> None:
        self.offsets = np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)
        self.tokens = np.arange(self.offsets[-1], dtype=np.int32)


def write_rows(file: Path, rows: Sequence[Any]) -> Path:
    """Write JSON lines; a row that is a str is a line as it is. A suffix .gz or .zst compresses."""
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()
    if file.suffix == ".gz":
        text = gzip.compress(text)
    elif file.suffix == ".zst":
        import zstandard

        half = len(text) // 2  # of several frames
        text = b"".join(map(zstandard.ZstdCompressor().compress, (text[:half], text[half:])))
    file.write_bytes(text)
    return file


def texts(count: int) -> list[dict[str, Any]]:
    """Rows of texts of different lengths, also with characters of several bytes."""
    return [{"text": f"document {number} " + "ä€x" * (number % 7), "number": number} for number in range(count)]
