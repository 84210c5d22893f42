"""Documents as token ids: one long array of tokens, and the positions at which documents begin.

Folders that `colossus data prepare` writes, files of Megatron-LM, and files of token ids that have an end token are
such arrays already, and stay on the disk (memory-mapped).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from colossus.config.user_path import user_path
from colossus.data.documents.row_source import RowSource, fingerprint_of, fingerprint_of_files
from colossus.data.tokenizer import DatasetTokenizer, dataset_tokenizer
from colossus.data.tokens import open_tokens

#: files of a folder: ids [t], starts of documents [n + 1], their lines in the file of rows [n], whether a token is
#: trained on [t] (of chats), and the description, which is written last
TOKENS, OFFSETS, LINES, TRAINED, DESCRIPTION = (
    "tokens.npy", "offsets.npy", "lines.npy", "trained.npy", "documents.json",
)  # fmt: skip
#: version of the folders; those of another version are made again
VERSION = 1
#: entries of a description
_KEYS = {"version", "fingerprint", "tokenizer", "tree", "vocab_size", "skipped", "pieces"}


class TokenDocuments:
    """Documents of token ids.

    Attributes:
        name: name for messages.
        fingerprint: hash of the content.
        tokens: [t] integers.
        offsets: [n + 1] int64; document i is ``tokens[offsets[i]:offsets[i + 1]]``.
        trained: [t] uint8, 1 where a token is to be predicted; None: all are.
        tokenizer: tokenizer of the ids, if it is known.
        vocab_size: the largest id and one; None: unknown.
        skipped: kind of bad rows -> number of those that were left out.
        children: trees of what they were made of.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray | None = None
    vocab_size: int | None = None
    skipped: Mapping[str, int] = MappingProxyType({})

    def __init__(self, name: str, fingerprint: str, tokenizer: DatasetTokenizer | None = None) -> None:
        self.name, self.fingerprint, self.tokenizer = name, fingerprint, tokenizer
        self.children: list[str] = []
        self._open()

    def _open(self) -> None:
        """Map the arrays into memory."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of a document, [its tokens]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __getstate__(self) -> dict[str, Any]:
        # pickled memory maps would copy the files to each worker
        return {**self.__dict__, "tokens": None, "offsets": None, "trained": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def place(self, index: int) -> str:
        """Return the place of a document for messages."""
        return f"{self.name}, document {index:,}"

    def tree(self) -> list[str]:
        """Return the lines of the documents and of what they were made of."""
        head = f"{self.name}: {len(self):,} documents, {len(self.tokens):,} tokens, fingerprint {self.fingerprint[:12]}"
        return [head, *(f"  {line}" for line in self.children)]


class PreparedDocuments(TokenDocuments):
    """A folder that `colossus data prepare` wrote.

    Args:
        path: the folder.
        tokenizer: tokenizer that made the ids, see `dataset_tokenizer`, if the folder is named without its source.

    Raises:
        ValueError: if it is no such folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | DatasetTokenizer | None = None,
        name: str | None = None,
        source: RowSource | None = None,
    ) -> None:
        self.folder, self._source = user_path(path), source
        name = name or f"PreparedDocuments {os.fspath(path)}"
        if not isinstance(tokenizer, DatasetTokenizer):
            tokenizer = dataset_tokenizer(tokenizer, name)
        about = read_description(self.folder)
        if about is None:
            raise ValueError(
                f"{name}: it has no {DESCRIPTION} that can be read (looked from {os.getcwd()}): make it by "
                f"'colossus data prepare'"
            )
        self.about = about
        if self.about["version"] != VERSION:
            raise ValueError(f"{name} is of version {self.about['version']}, not {VERSION}: prepare it again")
        if tokenizer is not None and tokenizer.sha256 != self.about["tokenizer"]:
            raise ValueError(f"{name}: its ids were made by another tokenizer than {tokenizer.path or tokenizer.name}")
        self.skipped, self.vocab_size = about["skipped"], int(about["vocab_size"])
        super().__init__(name, self.about["fingerprint"], tokenizer)
        self.children = list(self.about["tree"])

    def _open(self) -> None:
        self.tokens, self.offsets = (np.load(self.folder / file, mmap_mode="r") for file in (TOKENS, OFFSETS))
        trained = self.folder / TRAINED
        self.trained = np.load(trained, mmap_mode="r") if trained.exists() else None

    def place(self, index: int) -> str:
        lines = np.load(self.folder / LINES, mmap_mode="r")
        title = next(title for first, title in reversed(self.about["pieces"]) if first <= index)
        line = int(lines[index])
        return f"{title}, line {line:,}" if self._source is None else self._source.place(title, line)


def read_description(folder: Path) -> dict[str, Any] | None:
    """Return the description of a folder of prepared documents; None if it has none that can be read."""
    try:
        about = json.loads((folder / DESCRIPTION).read_bytes())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and about.keys() >= _KEYS else None


class MegatronDocuments(TokenDocuments):
    """A pair of files of Megatron-LM, ``PREFIX.bin`` and ``PREFIX.idx``; each of its sequences is a document.

    The format is that of `megatron/core/datasets/indexed_dataset.py`.

    Args:
        path: the prefix, or one of the two files.
        tokenizer: tokenizer that made the ids, see `dataset_tokenizer`.

    Raises:
        ValueError: if a file is missing or has another format.
    """

    _MAGIC = b"MMIDIDX\x00\x00"
    _DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}

    def __init__(self, path: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None) -> None:
        prefix = os.fspath(user_path(path)).removesuffix(".bin").removesuffix(".idx")
        name = f"MegatronDocuments {prefix}"
        self._files = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]
        for file in self._files:
            if not file.is_file():
                raise ValueError(f"{name}: {file} does not exist (looked from {os.getcwd()})")
        fingerprint = fingerprint_of("Megatron", fingerprint_of_files(self._files))
        super().__init__(name, fingerprint, dataset_tokenizer(tokenizer, name))

    def _open(self) -> None:
        index, content = self._files
        head = index.open("rb").read(34)
        if head[:9] != self._MAGIC or len(head) < 34 or struct.unpack("<Q", head[9:17])[0] != 1:
            raise ValueError(f"{self.name}: {index} is no index of Megatron-LM, version 1 (its first bytes differ)")
        code, count, _ = struct.unpack("<BQQ", head[17:34])
        if code not in self._DTYPES:
            raise ValueError(f"{self.name}: {index} has ids of dtype code {code}; known: {sorted(self._DTYPES)}")
        lengths = np.fromfile(index, np.int32, count, offset=34).astype(np.int64)
        starts = np.fromfile(index, np.int64, count, offset=34 + 4 * count)
        self.tokens = np.memmap(content, self._DTYPES[code], "r")
        self.offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        if len(starts) < count or int(self.offsets[-1]) != len(self.tokens):
            raise ValueError(
                f"{self.name}: the index has {int(self.offsets[-1]):,} tokens, but {content} has {len(self.tokens):,}: "
                f"a file is cut off, or they are no pair"
            )
        if not np.array_equal(starts, self.offsets[:-1] * self.tokens.itemsize):
            raise ValueError(f"{self.name}: its sequences are not one after the other in {content}")


class TokenFileDocuments(TokenDocuments):
    """A file of token ids, see `TokenFile`, in which each document ends with an end token.

    Args:
        path: the file.
        end: the id that ends a document; it is the document's last token.
        dtype: dtype of a raw file, by default ``"uint16"``.
        tokenizer: tokenizer that made the ids, see `dataset_tokenizer`.

    Raises:
        ValueError: if the file cannot be read as such.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        end: int,
        dtype: str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        name = f"TokenFileDocuments {os.fspath(path)}"
        self._file, self._dtype, self._end = user_path(path), dtype, end
        self.offsets = np.zeros(0, np.int64)
        open_tokens(self._file, dtype, name)
        fingerprint = fingerprint_of("TokenFile", end, dtype, fingerprint_of_files([self._file]))
        super().__init__(name, fingerprint, dataset_tokenizer(tokenizer, name))

    def _open(self) -> None:
        self.tokens, at_once = open_tokens(self._file, self._dtype, self.name), 1 << 24
        if len(self.offsets):  # a pickled copy
            return
        ends = [np.zeros(1, np.int64)]
        for start in range(0, len(self.tokens), at_once):
            ends.append(np.flatnonzero(self.tokens[start : start + at_once] == self._end) + start + 1)
        if int(ends[-1][-1] if len(ends[-1]) else 0) != len(self.tokens):  # the last document has no end token
            ends.append(np.array([len(self.tokens)], np.int64))
        self.offsets = np.concatenate(ends)

    def __getstate__(self) -> dict[str, Any]:
        # the ends of documents are found by reading the whole file, which no worker does again
        return {**super().__getstate__(), "offsets": self.offsets}
