"""Rows of a model's input that are packed from documents."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from colossus.data.documents.encoder import Encoder, Text
from colossus.data.documents.kinds import DOCUMENTS, make_source
from colossus.data.documents.packing import STRATEGIES, Spans, pack, ranges
from colossus.data.documents.prepare import prepared
from colossus.data.documents.row_source import RowSource, fingerprint_of
from colossus.data.documents.token_documents import TokenDocuments
from colossus.data.sampler import permute
from colossus.data.tokenizer import dataset_tokenizer, require_same_tokens
from colossus.data.tokens import BatchedDataset, TooLittleData, check_split

#: label of a token that has no next one in its document, or none that is trained on
NO_LABEL = -100
LONG = ("cut", "error", "skip")


class Packed(BatchedDataset):
    """Rows of ``seq_len`` tokens, each of whole documents as far as possible.

    Every token is an input exactly once, and every token but the first of a document is a label exactly once. A row is
    a pure function of its number and of ``seed``, which decides the documents that share a row.

    Sample: ``inputs = dict(ids, documents, positions)`` and ``labels``, all int64 [seq_len]. ``documents`` has the
    number of the document in the row, which attention does not cross, and ``positions`` the place in it. Padding is a
    document of its own of zeros without labels. A label is -100 where a document ends, and where a chat's token is not
    of the assistant.

    Args:
        source: documents, or ``dict(type=.., **options)``: a source of rows, whose key ``text`` is encoded; an encoder
            (`Text`, `Chat`); or token ids that exist.
        seq_len: tokens of a row.
        strategy: see `colossus.data.documents.packing.pack`.
        long: documents of more tokens than a row are ``"cut"``, an ``"error"`` (that of chats by default), or left out
            (``"skip"``).
        split: ``"train"`` or ``"validation"``.
        validation_fraction: fraction of the documents that is held out; 0 holds nothing out.
        tokenizer: tokenizer of an encoder that names none, see `Encoder`.
        vocab_size: ids must be below it; None if it is unknown.
        seed: seed of the order in which documents are packed, and of that of the rows.

    Attributes:
        documents: the documents of all splits.
        num_documents: documents of this split.
        padding: fraction of the tokens that is padding.
        num_long: documents that were cut or left out.

    Raises:
        ValueError: for an unknown option, a bad row, or a document that is too long.
        TooLittleData: if the split has no document.
    """

    def __init__(
        self,
        source: Any,
        seq_len: int,
        strategy: str = "best_fit",
        long: str | None = None,
        split: str = "train",
        validation_fraction: float = 0.05,
        tokenizer: str | os.PathLike[str] | None = None,
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        check_split(split, validation_fraction, "Packed")
        for option, value, choices in (("strategy", strategy, STRATEGIES), ("long", long, (None, *LONG))):
            if value not in choices:
                raise ValueError(f"Packed: {option} = {value!r} is not one of {', '.join(map(repr, choices))}")
        if seq_len < 1:
            raise ValueError(f"Packed: seq_len = {seq_len}: a row has 1 token or more")
        self.documents = make_documents(source, tokenizer)
        self.seed, self.seq_len, self.strategy = seed, seq_len, strategy
        self.name = f"Packed {strategy} ({split})"
        self.long = long or ("cut" if self.documents.trained is None else "error")
        self.tokenizer = self.documents.tokenizer
        self.vocab_size = self.documents.vocab_size
        self._limit = vocab_size if self.vocab_size is None else None
        chosen = self._documents_of_split(split, validation_fraction)
        self.fingerprint = fingerprint_of(
            "Packed", self.documents.fingerprint, seq_len, strategy, self.long, split, validation_fraction
        )
        self.num_documents = len(chosen)
        if not len(chosen):
            raise TooLittleData(
                f"{self.name}: none of {len(self.documents):,} documents is in this split{self._omitted()}"
                + ("; without skip the first of those is an error that says why" if self.documents.skipped else "")
            )
        order = chosen[permute(np.arange(len(chosen)), len(chosen), seed, 0)]
        starts = np.asarray(self.documents.offsets[:-1])[order]
        lengths = np.asarray(self.documents.offsets[1:])[order] - starts
        self._spans: Spans = pack(starts, lengths, seq_len, strategy)
        self.padding = 1 - int(lengths.sum()) / (len(self) * seq_len)

    def _documents_of_split(self, split: str, fraction: float) -> np.ndarray:
        """Return the numbers of the documents of a split that are packed, [n]."""
        count = len(self.documents)
        held_out = permute(np.arange(count), count, 0, 0) < round(count * fraction) if count else np.zeros(0, bool)
        chosen = np.flatnonzero(held_out == (split == "validation"))
        lengths = np.diff(np.asarray(self.documents.offsets))[chosen]
        self.num_long = int((lengths > self.seq_len).sum())
        if self.num_long and self.long == "error":
            first = int(chosen[np.argmax(lengths > self.seq_len)])
            raise ValueError(
                f"{self.documents.place(first)}: a document of {len(self.documents[first]):,} tokens is longer than a "
                f"row of {self.seq_len:,}, and {self.num_long - 1:,} others are; use a larger model.seq_len, or "
                f"data.long='cut' or 'skip'"
            )
        return chosen[(lengths > 0) & ((lengths <= self.seq_len) | (self.long == "cut"))]

    def __len__(self) -> int:
        return len(self._spans.rows) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each row without its padding, [rows]."""
        ends = np.concatenate(([0], np.cumsum(self._spans.lengths)))
        of_packing: np.ndarray = np.diff(ends[self._spans.rows])
        return of_packing[self._packed_row(np.arange(len(self)))]

    def _packed_row(self, rows: np.ndarray) -> np.ndarray:
        """Return the row in the order of packing of each of these rows.

        Best fit makes rows in the order of falling lengths, but any first rows are to be like all others.
        """
        return permute(rows, len(self), self.seed, 1)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        """Return ``inputs = dict(ids, documents, positions)`` and ``labels``, int64 [b, seq_len], of rows [b]."""
        rows, tokens, shape = np.asarray(indices), self.documents.tokens, (len(indices), self.seq_len)
        rows = self._packed_row(rows)
        first, counts = self._spans.rows[rows], self._spans.rows[rows + 1] - self._spans.rows[rows]
        spans = ranges(first, counts)
        starts, lengths = self._spans.starts[spans], self._spans.lengths[spans]
        before = np.cumsum(lengths) - lengths
        of_row = np.cumsum(counts) - counts
        places = ranges(np.repeat(np.arange(len(rows)) * self.seq_len - before[of_row], counts) + before, lengths)

        ids = np.zeros(shape, np.int64)
        documents = np.repeat(counts, self.seq_len).reshape(shape)  # padding is the last document
        positions = np.zeros(shape, np.int64)
        labels = np.full(shape, NO_LABEL, np.int64)
        sources = ranges(starts, lengths)
        ids.flat[places] = own = tokens[sources].astype(np.int64)
        documents.flat[places] = np.repeat(spans - np.repeat(first, counts), lengths)
        positions.flat[places] = np.arange(len(places)) - np.repeat(before, lengths)
        following = np.roll(own, -1)
        ends, closed = before + lengths - 1, self._spans.closed[spans]
        following[ends] = NO_LABEL
        following[ends[~closed]] = tokens[(starts + lengths)[~closed]]
        if self.documents.trained is not None:
            is_trained = self.documents.trained[np.minimum(sources + 1, len(tokens) - 1)]
            following[is_trained == 0] = NO_LABEL
        labels.flat[places] = following
        if self._limit is not None and len(own) and not 0 <= int(own.min()) <= int(own.max()) < self._limit:
            raise ValueError(
                f"{self.name} has token ids from {int(own.min())} to {int(own.max())}, but model.vocab_size = "
                f"{self._limit}: set it to {int(own.max()) + 1} or more, or check the dtype of the file"
            )
        inputs = {"ids": ids, "documents": documents, "positions": positions}
        return {
            "inputs": {key: torch.from_numpy(value) for key, value in inputs.items()},
            "labels": torch.from_numpy(labels),
        }

    def describe(self) -> str:
        """Return one line for logs."""
        return (
            f"{self.name}: {len(self):,} rows of {self.seq_len}, {self.num_documents:,} documents, padding "
            f"{self.padding:.2%}{self._omitted()}"
        )

    def _omitted(self) -> str:
        """Return the long documents and the bad rows, by their kinds, as a part of a sentence."""
        bad = ", ".join(f"{count:,} {kind}" for kind, count in self.documents.skipped.items())
        return (f", {self.num_long:,} long ones {self.long.replace('skip', 'left out')}" if self.num_long else "") + (
            f", left out of all: {bad}" if bad else ""
        )

    def tree(self) -> list[str]:
        """Return the lines of the rows and of what they are made of."""
        return [self.describe(), *(f"  {line}" for line in self.documents.tree())]


def make_documents(source: Any, tokenizer: str | os.PathLike[str] | None = None) -> TokenDocuments:
    """Return the documents of a source; rows and encoders are prepared if that was not done before.

    Args:
        source: documents, or ``dict(type=.., **options)``, see `Packed`.
        tokenizer: tokenizer of an encoder that names none.

    Raises:
        ValueError: if the source is none of these, or a row is bad.
    """
    encoder = make_encoder(source, tokenizer)
    return prepared(encoder) if isinstance(encoder, Encoder) else encoder


def make_encoder(source: Any, tokenizer: str | os.PathLike[str] | None = None) -> Encoder | TokenDocuments:
    """Return the encoder of a source, or the documents where they are token ids already; see `make_documents`."""
    is_named = isinstance(source, Mapping)
    encoder = make_source(source, {"tokenizer": tokenizer}, "data.source") if is_named else source
    if isinstance(encoder, RowSource):
        encoder = Text(encoder, tokenizer=tokenizer)
    if not isinstance(encoder, Encoder | TokenDocuments):
        raise ValueError(
            f"source = {type(encoder).__name__} gives no documents; use dict(type=..) of {', '.join(DOCUMENTS.names())}"
        )
    if not (is_named and "tokenizer" in source):
        require_same_tokens(dataset_tokenizer(tokenizer, "Packed"), encoder.tokenizer, "data.source")
    return encoder
