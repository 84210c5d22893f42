"""How text becomes token ids: as bytes, or by a ``tokenizer.json`` of Hugging Face, whose ids are kept on the disk."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colossus.checkpoint.manifest import BYTES, TOKENIZER_FILE
from colossus.data.token_cache import kept_ids

#: changes what is kept on the disk: files of another number are not read
_VERSION = 2
#: bytes of text that are encoded at a time
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class DatasetTokenizer:
    """What a dataset says of its ids, and what each checkpoint of a run with it holds.

    Attributes:
        name: as of `colossus.checkpoint.Manifest`: ``bytes`` or ``tokenizer.json``.
        content: of the file as it was when the dataset was made; empty for bytes.
        path: of the file.
    """

    name: str
    content: bytes = field(default=b"", repr=False)
    path: Path | None = None

    @property
    def files(self) -> Mapping[str, bytes]:
        """What goes into the folder of a checkpoint."""
        return {self.name: self.content} if self.content else {}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, texts: Sequence[bytes], title: str) -> np.ndarray[Any, Any]:
        """The ids of texts, one behind the other, [ids] uint16 or uint32; without special tokens.

        Each text is UTF-8, in which invalid bytes become U+FFFD. Ids that were made once are kept for all
        processes of a machine (`kept_ids`).

        Raises:
            ValueError: without the library `tokenizers`, or for a file that it cannot read.
        """
        key = hashlib.sha256(f"{_VERSION} {self.sha256}".encode())
        for text in texts:
            key.update(hashlib.sha256(text).digest())
        return kept_ids(key.hexdigest(), lambda: self._encode(texts, title))

    def _encode(self, texts: Sequence[bytes], title: str) -> np.ndarray[Any, Any]:
        encoder = load_tokenizer(self.content, f"{title}: tokenizer {str(self.path)!r}")
        largest = max(encoder.get_vocab(with_added_tokens=True).values(), default=0)
        dtype = np.uint16 if largest < 1 << 16 else np.uint32
        parts, done, total = [np.zeros(0, dtype)], 0, sum(map(len, texts))
        is_told = total > _AT_ONCE and sys.stderr.isatty()
        for some in _together(texts):
            if is_told:
                print(
                    f"\r{title}: {done / 1e6:.0f} of {total / 1e6:.0f} MB encoded", end="", file=sys.stderr, flush=True
                )
            decoded = [text.decode("utf-8", "replace") for text in some]
            parts += [np.array(each.ids, dtype) for each in encoder.encode_batch(decoded, add_special_tokens=False)]
            done += sum(map(len, some))
        if is_told:
            print(f"\r{'':<{len(title) + 40}}\r", end="", file=sys.stderr, flush=True)
        return np.concatenate(parts)


def _together(texts: Sequence[bytes]) -> Iterator[list[bytes]]:
    some: list[bytes] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= _AT_ONCE:
            yield some
            some, size = [], 0
    yield some


def load_tokenizer(content: bytes, title: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a tokenizer.json, without the length to which the file may have texts cut or
    padded: a text is all of its tokens and no others.

    Args:
        title: what a message begins with.

    Raises:
        ValueError: without the library `tokenizers`, or for a file that it cannot read.
    """
    try:
        library = importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise ValueError(
            f"{title} needs the library tokenizers, which is not installed: pip install colossus[hf]"
        ) from None
    try:
        made = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare ones
        raise ValueError(f"{title} cannot be read: {error}") from None
    made.no_truncation()
    made.no_padding()
    return made


def dataset_tokenizer(given: str | os.PathLike[str] | None, title: str) -> DatasetTokenizer | None:
    """What ``data.tokenizer`` means: ``"bytes"``, a tokenizer.json, a folder with one, or None.

    Raises:
        ValueError: for a file that is not there, or is none.
    """
    if given is None:
        return None
    if given == BYTES:
        return DatasetTokenizer(BYTES)
    path = Path(given).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        what = f"has no {TOKENIZER_FILE}" if path.is_dir() else error.strerror or str(error)
        raise ValueError(
            f"{title}: tokenizer = {str(given)!r}: {what} (looked from {os.getcwd()}); name a {TOKENIZER_FILE}, a "
            f"folder with one, or {BYTES!r}"
        ) from None
    if not content.lstrip().startswith(b"{"):
        raise ValueError(f"{title}: tokenizer = {str(given)!r}: {file} is no {TOKENIZER_FILE} (it is no JSON object)")
    return DatasetTokenizer(TOKENIZER_FILE, content, file)
