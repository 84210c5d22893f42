"""Encoders: rows of a source as token ids, document by document. No torch."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from colossus.checkpoint.manifest import BYTES
from colossus.data.documents.kinds import make_source
from colossus.data.documents.row_source import BadRow, Row, RowSource, fingerprint_of
from colossus.data.tokenizer import DatasetTokenizer, dataset_tokenizer, library_version, load_tokenizer


class Encoded(NamedTuple):
    """A document: ids [t], and whether each token is trained on, [t] bool; None: all are."""

    ids: np.ndarray
    trained: np.ndarray | None = None


class Encoder(ABC):
    """Rows as token ids.

    Args:
        source: the rows, or ``dict(type=.., **options)`` of a registered source.
        tokenizer: ``"bytes"``, a tokenizer.json or a folder with one; None: bytes, unless what reads the documents has
            one.
        skip: kinds of bad rows that are left out and counted, see `BadRow.KINDS`, or True for all; any other bad row is
            an error.

    Raises:
        ValueError: if there is no such source, tokenizer or kind.
    """

    def __init__(self, source: Any, tokenizer: Any, skip: Sequence[str] | bool) -> None:
        title = type(self).__name__
        self.source: RowSource = make_rows(source, title)
        self.tokenizer: DatasetTokenizer = dataset_tokenizer(BYTES if tokenizer is None else tokenizer, title)
        self.skip = tuple(BadRow.KINDS) if skip is True else (skip,) if isinstance(skip, str) else tuple(skip or ())
        for kind in self.skip:
            if kind not in BadRow.KINDS:
                raise ValueError(f"{title}: skip has {kind!r}; kinds are {', '.join(BadRow.KINDS)}, or True for all")
        self._loaded: Any = None

    @property
    def fingerprint(self) -> str:
        """Hash of the ids."""
        tokenizer = self.tokenizer.name, self.tokenizer.sha256
        return fingerprint_of(type(self).__name__, *tokenizer, *self.options(), *self.skip, self.source.fingerprint)

    @abstractmethod
    def options(self) -> tuple[object, ...]:
        """Return the options that the ids depend on, each printable."""

    @abstractmethod
    def encode(self, rows: Sequence[Row]) -> list[Encoded | BadRow]:
        """Return the document of each row, or why it is none."""

    @functools.cached_property
    def num_ids(self) -> int:
        """One more than the largest id of the tokenizer."""
        if (encoder := self.library()) is None:
            return 256
        return max(encoder.get_vocab(with_added_tokens=True).values(), default=0) + 1

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """Dtype of stored ids."""
        return np.uint16 if self.num_ids <= 1 << 16 else np.uint32

    def library_version(self) -> str | None:
        """Return the version of the library that makes the ids; None for bytes."""
        return library_version() if self.tokenizer.name != BYTES else None

    def library(self) -> Any:
        """Return the ``tokenizers.Tokenizer``; None for bytes."""
        if self.tokenizer.name != BYTES and self._loaded is None:
            self._loaded = load_tokenizer(self.tokenizer.content, f"{type(self).__name__}: {self.tokenizer.path}")
        return self._loaded

    def ids_of(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, [t]."""
        if (encoder := self.library()) is None:
            return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts]
        encodings = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def tokenize(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids [t] and the (start, stop) in characters of each token [t, 2], for each text."""
        if (encoder := self.library()) is None:
            return [_bytes_of(text) for text in texts]
        return [
            (np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2))
            for encoding in encoder.encode_batch(list(texts), add_special_tokens=False)
        ]

    def id_of(self, token: int | str | None, option: str) -> list[int]:
        """Return the id of a token that an option names by its id or text; nothing for None.

        Raises:
            ValueError: if the tokenizer has no such token.
        """
        if token is None:
            return []
        number = token if isinstance(token, int) else None
        if isinstance(token, str) and (encoder := self.library()) is not None:
            number = encoder.token_to_id(token)
        if number is None or not 0 <= number < self.num_ids:
            raise ValueError(f"{type(self).__name__}: {option} = {token!r} is no token of the tokenizer")
        return [number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    def tree(self) -> list[str]:
        """Return the lines of the encoder and of its rows."""
        tokenizer = self.tokenizer.path or self.tokenizer.name
        return [f"{type(self).__name__}, tokenizer {tokenizer}", f"  {self.source.tree()}"]


class Text(Encoder):
    """The text of each row.

    Args:
        source, tokenizer, skip: see `Encoder`.
        key: key of the text in a row.
        begin, end: a token before and behind each document: its id, its text in the tokenizer, or None.
    """

    def __init__(
        self,
        source: Any,
        key: str = "text",
        tokenizer: str | os.PathLike[str] | None = None,
        begin: int | str | None = None,
        end: int | str | None = None,
        skip: Sequence[str] | bool = (),
    ) -> None:
        super().__init__(source, tokenizer, skip)
        self.key = key
        self.begin, self.end = self.id_of(begin, "begin"), self.id_of(end, "end")

    def options(self) -> tuple[object, ...]:
        return self.key, self.begin, self.end

    def encode(self, rows: Sequence[Row]) -> list[Encoded | BadRow]:
        texts = [self._text(row) for row in rows]
        ids = iter(self.ids_of([text for text in texts if isinstance(text, str)]))
        return [text if isinstance(text, BadRow) else Encoded(self._ids(next(ids))) for text in texts]

    def _text(self, row: Row) -> str | BadRow:
        text = row.get(self.key)
        if isinstance(text, str):
            return text or BadRow("empty", f"{self.key!r} is empty")
        if isinstance(text, bytes):
            return BadRow("broken", f"{self.key!r} is no text in UTF-8")
        what = f"is a {type(text).__name__}, not a text" if self.key in row else "is missing"
        return BadRow("missing", f"{self.key!r} {what}; it has {', '.join(map(repr, row))}")

    def _ids(self, ids: np.ndarray) -> np.ndarray:
        return np.concatenate((self.begin, ids, self.end)).astype(self.dtype) if self.begin or self.end else ids


def _bytes_of(text: str) -> tuple[np.ndarray, np.ndarray]:
    content = text.encode("utf-8", "replace")
    ids = np.frombuffer(content, np.uint8)
    # each byte that is no continuation begins a character
    characters = np.cumsum((ids & 0xC0) != 0x80) - 1
    return ids, np.stack((characters, characters + 1), axis=1)


def make_rows(spec: Any, user: str) -> RowSource:
    """Return the source of rows of ``dict(type=.., **options)``, or the source itself.

    Raises:
        ValueError: if it is none.
    """
    source = make_source(spec, {}, "data.source.source") if isinstance(spec, Mapping) else spec
    if not isinstance(source, RowSource):
        raise ValueError(
            f"{user}: source = {type(source).__name__} is no source of rows; use dict(type=..), for "
            f"example of Jsonl, Parquet, HuggingFaceDataset or TextFiles"
        )
    return source
