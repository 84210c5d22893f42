"""Token ids in one flat file, memory-mapped: a corpus larger than memory costs nothing to open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from colossus.data.tokenizer import dataset_tokenizer
from colossus.data.windows import TokenWindows, check_split


class TokenFile(TokenWindows):
    """A file of token ids, either raw integers or a one-dimensional ``.npy``; its tail is held out for validation.

    Args:
        path: the file; ``~`` is understood.
        seq_len: tokens of a sample.
        split: ``"train"`` (the head) or ``"validation"`` (the tail).
        dtype: of a raw file, ``"uint16"`` unless given; a ``.npy`` knows its own and must agree when both are given.
        validation_fraction: share of the tokens held out; 0 holds nothing out.
        tokenizer: what made the ids, for the record: ``"bytes"``, a ``tokenizer.json`` or a folder with one. Each
            checkpoint holds it, so that ``colossus generate`` knows it.
        vocab_size: when given (the loader passes the model's), every batch read is checked for ids outside it.

    Raises:
        ValueError: a missing or empty file, a size that is no multiple of the item size, a dtype that is no integer;
            from `batch`, an id outside the vocabulary.
        TooLittleData: this split is too short for one sample.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        seq_len: int,
        split: str = "train",
        dtype: str | None = None,
        validation_fraction: float = 0.05,
        vocab_size: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        name = f"TokenFile {str(path)!r}"
        check_split(split, validation_fraction, name)
        self.tokenizer = dataset_tokenizer(tokenizer, name)
        self._file = Path(path).expanduser()
        self._dtype = dtype
        tokens = _open(self._file, dtype, name)
        cut = len(tokens) - round(len(tokens) * validation_fraction)
        self._range = slice(0, cut) if split == "train" else slice(cut, len(tokens))
        super().__init__(tokens[self._range], seq_len, name=f"{name} ({split})", vocab_size=vocab_size, check_ids=True)
        self.info = {"split": split, "tokens": len(self.tokens), "dtype": str(tokens.dtype)}

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would carry the whole file to each worker; the path is enough.
        return {**self.__dict__, "tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tokens = _open(self._file, self._dtype, self.name)[self._range]


def _open(path: Path, dtype: str | None, name: str) -> np.ndarray:
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ValueError(f"{name} {what} (looked from {os.getcwd()}); set data.path to a file of token ids")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{name} is empty (0 bytes)")
    asked = _integer_dtype(dtype, name) if dtype is not None else None
    if path.suffix == ".npy":
        return _open_npy(path, asked, name)
    kind = asked or np.dtype("uint16")
    if size % kind.itemsize:
        raise ValueError(
            f"{name} has {size} bytes, which is not a multiple of {kind.itemsize} (one {kind} token): "
            f"the file is cut off, or data.dtype is not the type it was written with"
        )
    return np.memmap(path, dtype=kind, mode="r")


def _open_npy(path: Path, asked: np.dtype[Any] | None, name: str) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises many, tokenize.TokenError among them
        raise ValueError(f"{name} cannot be read as .npy: {error}") from error
    if tokens.ndim != 1:
        raise ValueError(
            f"{name} has shape {list(tokens.shape)}; token ids must be one-dimensional: save array.reshape(-1)"
        )
    _integer_dtype(tokens.dtype.name, name)
    if asked is not None and asked != tokens.dtype:
        raise ValueError(f"{name} holds {tokens.dtype}, but data.dtype = {asked}; leave data.dtype out for .npy")
    return tokens


def _integer_dtype(dtype: str, name: str) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{name}: data.dtype = {dtype!r} is not a numpy type; use 'uint16' or 'uint32'") from error
    if kind.kind not in "iu":
        raise ValueError(f"{name}: tokens of type {kind} are not integers; use 'uint16' or 'uint32'")
    return kind
