"""The tokens of one piece of a source, as a file. No torch, so that the processes that write them start at once."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from colossus.data.documents.encoder import Encoded, Encoder
from colossus.data.documents.row_source import BadRow, Piece, Row

#: rows that are encoded at a time
_AT_ONCE = 256


class PieceTokens(NamedTuple):
    """Documents of a piece: ids [t], lengths [n], lines [n], trained [t] uint8 or nothing, and what was left out."""

    tokens: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    trained: np.ndarray
    skipped: dict[str, int]


def encode_piece(encoder: Encoder, piece: Piece) -> PieceTokens:
    """Return the documents of a piece.

    Raises:
        ValueError: for a bad row whose kind is not skipped; it names the file and the line.
    """
    dtype = encoder.dtype
    documents: list[Encoded] = []
    lines: list[int] = []
    skipped: Counter[str] = Counter()
    for line, document in _documents(encoder, piece):
        if isinstance(document, Encoded) and not len(document.ids):
            document = BadRow("empty", "the tokenizer makes no tokens of it")
        if isinstance(document, BadRow):
            if document.kind not in encoder.skip:
                raise ValueError(
                    f"{encoder.source.place(piece.title, line)}: {document}; mend the row, or leave out all rows of "
                    f"this kind ({BadRow.KINDS[document.kind]}) by skip=[{document.kind!r}] in the encoder: "
                    f"dict(type={type(encoder).__name__!r}, source=.., skip=[{document.kind!r}])"
                )
            skipped[document.kind] += 1
            continue
        documents.append(document)
        lines.append(line)
    ids = [document.ids.astype(dtype) for document in documents]
    marks = [document.trained for document in documents]
    return PieceTokens(
        np.concatenate([np.zeros(0, dtype), *ids]),
        np.array([len(own) for own in ids], np.int64),
        np.array(lines, np.int64),
        np.concatenate([np.zeros(0, np.uint8), *(mark.astype(np.uint8) for mark in marks if mark is not None)]),
        dict(skipped),
    )


def _documents(encoder: Encoder, piece: Piece) -> Iterator[tuple[int, Encoded | BadRow]]:
    try:
        rows = encoder.source.read(piece)
        while block := list(islice(rows, _AT_ONCE)):
            good: list[Row] = [row for _, row in block if not isinstance(row, BadRow)]
            encoded = iter(encoder.encode(good))
            yield from ((line, row if isinstance(row, BadRow) else next(encoded)) for line, row in block)
    except OSError as error:
        raise ValueError(f"{piece.title} cannot be read: {error}") from error


class PieceSize(NamedTuple):
    """The size of a piece's file: documents, tokens, marks of tokens, one more than the largest id, rows left out."""

    documents: int
    tokens: int
    trained: int
    vocab_size: int
    skipped: dict[str, int]


def write_piece(encoder: Encoder, piece: Piece, file: Path) -> PieceSize:
    """Write the documents of a piece into a file, which appears when it is whole."""
    *arrays, skipped = documents = encode_piece(encoder, piece)
    vocab_size = int(documents.tokens.max()) + 1 if len(documents.tokens) else 0
    size = PieceSize(len(documents.lengths), len(documents.tokens), len(documents.trained), vocab_size, skipped)
    temporary = file.with_name(f".{uuid.uuid4().hex}.npz")
    try:
        np.savez(temporary, *arrays, size=np.array(json.dumps(size)))
        temporary.rename(file)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def read_size(file: Path) -> PieceSize:
    """Return the size of the file of a piece."""
    with np.load(file, allow_pickle=False) as arrays:
        return PieceSize(*json.loads(str(arrays["size"])))


def read_piece(file: Path, size: PieceSize) -> PieceTokens:
    """Return what `write_piece` wrote; ``size`` is that of `read_size`."""
    with np.load(file, allow_pickle=False) as arrays:
        tokens, lengths, lines, trained = (arrays[f"arr_{number}"] for number in range(4))
        return PieceTokens(tokens, lengths, lines, trained, size.skipped)
