"""Token ids of text: as bytes, or by a ``tokenizer.json`` of Hugging Face. Computed ids are cached on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, overload

import numpy as np

from colossus.checkpoint.manifest import BYTES, TOKENIZER_FILE
from colossus.config.errors import ConfigError
from colossus.config.user_path import user_path

#: version of the cached files; those of another version are not read
_VERSION = 2
#: texts that are encoded at a time
_AT_ONCE = 256

Ids = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DatasetTokenizer:
    """The tokenizer of a dataset, which each checkpoint of a run stores.

    Attributes:
        name: that of `colossus.checkpoint.Manifest`: ``bytes`` or ``tokenizer.json``.
        content: content of the file when the dataset was made; empty for bytes.
        path: path of the file.
    """

    name: str
    content: bytes = field(default=b"", repr=False)
    path: Path | None = None

    @property
    def files(self) -> Mapping[str, bytes]:
        """Files for the folder of a checkpoint."""
        return {self.name: self.content} if self.content else {}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, texts: Sequence[bytes], title: str) -> Ids:
        """Return the ids of texts one after the other, [ids] uint16 or uint32, without special tokens.

        Each text is UTF-8, in which invalid bytes become U+FFFD. Ids are cached for all processes of a machine
        (`cached_ids`).

        Raises:
            ValueError: without the library `tokenizers`, or for a file that it cannot read.
        """
        key = hashlib.sha256(f"{_VERSION} {library_version()} {self.sha256}".encode())
        for text in texts:
            key.update(hashlib.sha256(text).digest())
        return cached_ids(key.hexdigest(), lambda: self._encode(texts, title))

    def _encode(self, texts: Sequence[bytes], title: str) -> Ids:
        encoder = load_tokenizer(self.content, f"{title}: tokenizer {str(self.path)!r}")
        largest = max(encoder.get_vocab(with_added_tokens=True).values(), default=0)
        dtype = np.uint16 if largest < 1 << 16 else np.uint32
        parts = [np.zeros(0, dtype)]
        for start in range(0, len(texts), _AT_ONCE):
            decoded = [text.decode("utf-8", "replace") for text in texts[start : start + _AT_ONCE]]
            encodings = encoder.encode_batch(decoded, add_special_tokens=False)
            parts += [np.array(encoding.ids, dtype) for encoding in encodings]
        return np.concatenate(parts)


def library_version() -> str | None:
    """Return the version of the library `tokenizers`, whose ids may change with it; None where it is not installed."""
    try:
        return metadata.version("tokenizers")
    except metadata.PackageNotFoundError:
        return None


def load_tokenizer(content: bytes, title: str) -> Any:
    """Return the ``tokenizers.Tokenizer`` of a tokenizer.json.

    It does not truncate or pad, even if the file says so: a text is all of its tokens and no others.

    Args:
        content: content of the file.
        title: beginning of messages.

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
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare ones
        raise ValueError(f"{title} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@overload
def dataset_tokenizer(named: str | os.PathLike[str], title: str) -> DatasetTokenizer: ...


@overload
def dataset_tokenizer(named: str | os.PathLike[str] | None, title: str) -> DatasetTokenizer | None: ...


def dataset_tokenizer(named: str | os.PathLike[str] | None, title: str) -> DatasetTokenizer | None:
    """Return the tokenizer of ``data.tokenizer``: ``"bytes"``, a tokenizer.json, a folder with one, or None.

    Raises:
        ValueError: if the file does not exist, or is no tokenizer.json.
    """
    if named is None:
        return None
    if named == BYTES:
        return DatasetTokenizer(BYTES)
    path = user_path(named)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        what = f"has no {TOKENIZER_FILE}" if path.is_dir() else error.strerror or str(error)
        raise ValueError(
            f"{title}: tokenizer = {str(named)!r}: {what} (looked from {os.getcwd()}); name a {TOKENIZER_FILE}, a "
            f"folder with one, or {BYTES!r}"
        ) from None
    if not content.lstrip().startswith(b"{"):
        raise ValueError(f"{title}: tokenizer = {str(named)!r}: {file} is no {TOKENIZER_FILE} (it is no JSON object)")
    return DatasetTokenizer(TOKENIZER_FILE, content, file)


def tokenizer_of(data: Any) -> DatasetTokenizer | None:
    """Return the tokenizer that data names by an attribute ``tokenizer``, if it can be stored.

    A user's dataset may have "bytes", or the path of a tokenizer.json or of a folder with one.
    """
    named = getattr(data, "tokenizer", None)
    if isinstance(named, DatasetTokenizer):
        return named
    if named == BYTES or (isinstance(named, str | os.PathLike) and user_path(named).exists()):
        return dataset_tokenizer(named, f"the attribute of {type(data).__name__}")
    return None


def require_same_tokens(train: DatasetTokenizer | None, other: Any, key: str) -> None:
    """Raise ValueError if the training data and other data, that of ``key``, have different tokenizers."""
    if train is None or not isinstance(other, DatasetTokenizer):
        return
    if (train.name, train.content) != (other.name, other.content):
        raise ValueError(
            f"{key}: its ids are of {other.path or other.name}, those of the training data of "
            f"{train.path or train.name}; use the same tokenizer for both (data.tokenizer, {key}.tokenizer)"
        )


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache: ``$XDG_CACHE_HOME/colossus/name`` (``~/.cache``).

    Raises:
        ConfigError: if the home is not known.
    """
    try:
        return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "colossus" / name
    except ConfigError as error:
        raise ConfigError(f"{name} are stored in the cache of the user: set XDG_CACHE_HOME. {error}") from None


def cached_ids(key: str, make: Callable[[], Ids]) -> Ids:
    """Return the ids that ``make`` computes, [ids] uint16 or uint32; memory-mapped if they are cached under this key.

    The cache is ``$XDG_CACHE_HOME/colossus/tokens`` (``~/.cache``), if the home is known. A file that cannot be read is
    written again.
    """
    try:
        folder = cache_folder("tokens")
    except ConfigError:  # the home is unknown
        return make()
    file = folder / f"{key}.npy"
    with contextlib.suppress(Exception):  # numpy raises many: EOFError, ValueError, tokenize.TokenError, ..
        cached: Ids = np.load(file, mmap_mode="r", allow_pickle=False)
        if cached.ndim == 1 and cached.dtype in (np.uint16, np.uint32):
            return cached
    ids = make()
    with contextlib.suppress(OSError):  # a folder that cannot be written to, or is full: the ids are in memory
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{uuid.uuid4().hex}.npy"
        try:
            np.save(temporary, ids, allow_pickle=False)
            temporary.rename(file)
        finally:
            temporary.unlink(missing_ok=True)
    return ids
