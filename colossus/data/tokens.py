"""Next-token samples cut from one long array of token ids.

Text is such an array. A file of ids is one that is memory-mapped: a corpus larger than memory opens at once.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from colossus.config.user_path import user_path
from colossus.data.batch import map_batch
from colossus.data.tokenizer import dataset_tokenizer

SPLITS = ("train", "validation")


class TooLittleData(ValueError):
    """A dataset that cannot fill a single sample."""


class BatchedDataset(Dataset[dict[str, torch.Tensor]]):
    """A map-style dataset that reads a whole batch at once.

    A subclass has `__len__` and `batch`; the loader then never collates single samples. `batch` must depend on its
    indices only. (A dataset of another class keeps the usual path, whatever its methods are called.)
    """

    #: it draws no random numbers, so that no generator is seeded for its samples
    deterministic = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return samples ``indices`` ``[b]`` as tensors whose dim 0 is ``b``."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        sample: dict[str, torch.Tensor] = map_batch(lambda x: x[0], self.batch(np.array([index % len(self)])))
        return sample

    def describe(self) -> str:
        """Return one line for logs."""
        return type(self).__name__

    def tree(self) -> list[str]:
        """Return the lines of the dataset and of what it is made of."""
        return [self.describe()]


class TokenWindows(BatchedDataset):
    """Windows of ``seq_len + 1`` tokens that start every ``seq_len`` tokens.

    Sample ``i`` is ``inputs = tokens[i * seq_len : (i + 1) * seq_len]`` with the same shifted by one as ``labels``: the
    shift to the next token happens here, before anything splits the sequence. Every token but the first is a label
    exactly once; a tail too short for a window is left out.

    Args:
        tokens: ``[t]`` integers; a memory map stays one.
        seq_len: tokens of a sample.
        name: name of the data in messages.
        vocab_size: ids must be below it; None if it is unknown.
        check_ids: whether each batch is checked for ids outside ``0..vocab_size - 1`` (not needed for bytes).

    Raises:
        TooLittleData: fewer than ``seq_len + 1`` tokens.
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, *, name: str, vocab_size: int | None = None, check_ids: bool = False
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"{name}: seq_len = {seq_len}: a sample has at least one token")
        if len(tokens) < seq_len + 1:
            raise TooLittleData(
                f"{name} has {len(tokens)} tokens, but one sample needs seq_len + 1 = {seq_len + 1}; "
                f"use more data, a smaller seq_len (model.seq_len), or another share for validation"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.name = name
        self.vocab_size = vocab_size
        self._check_ids = check_ids

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return ``inputs`` and ``labels``, both int64 ``[b, seq_len]``, of samples ``indices`` ``[b]``."""
        itemsize = self.tokens.itemsize
        # all windows as one overlapping view, so that taking some copies whole rows
        windows = np.ndarray(
            (len(self), self.seq_len + 1), self.tokens.dtype, self.tokens, 0, (self.seq_len * itemsize, itemsize)
        )
        taken = windows[indices]
        if self._check_ids and taken.size:
            self._raise_on_bad_ids(taken)
        rows = torch.from_numpy(taken.astype(np.int64))
        return {"inputs": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def check_ids(self) -> None:
        """Check all tokens, or 64 pieces all over a longer array, for ids outside of the vocabulary.

        Raises:
            ValueError: naming such an id.
        """
        size, count = 1 << 20, len(self.tokens)
        for start in range(0, count if self._check_ids else 0, max(size, -(-count // 64))):
            self._raise_on_bad_ids(self.tokens[start : start + size])

    def _raise_on_bad_ids(self, taken: np.ndarray) -> None:
        largest, smallest = int(taken.max()), int(taken.min())
        if smallest < 0:
            raise ValueError(f"{self.name} has the token id {smallest}; ids must not be negative")
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(
                f"{self.name} has the token id {largest}, but the vocabulary has {self.vocab_size} "
                f"(ids 0..{self.vocab_size - 1}): set model.vocab_size to {largest + 1} or more, "
                f"or check the dtype of the file"
            )

    def describe(self) -> str:
        """Return one line for logs."""
        return f"{self.name}: {len(self.tokens):,} tokens, {len(self):,} samples of {self.seq_len}"


def check_split(split: str, validation_fraction: float, name: str) -> None:
    """Raise ValueError on an unknown split or share."""
    if split not in SPLITS:
        raise ValueError(f"{name}: split = {split!r} is not one of {', '.join(map(repr, SPLITS))}")
    if not isinstance(validation_fraction, int | float) or not 0 <= validation_fraction < 1:
        raise ValueError(f"{name}: validation_fraction = {validation_fraction!r} is outside 0 <= share < 1")
    if split == "validation" and validation_fraction == 0:
        raise TooLittleData(f"{name}: validation_fraction = 0, so nothing is held out for validation")


class TokenFile(TokenWindows):
    """A file of token ids, either raw integers or a one-dimensional ``.npy``; its tail is held out for validation.

    Args:
        path: the file; ``~`` is expanded.
        seq_len: tokens of a sample.
        split: ``"train"`` (the head) or ``"validation"`` (the tail).
        dtype: dtype of a raw file, by default ``"uint16"``; a ``.npy`` has its own.
        validation_fraction: fraction of the tokens that is held out; 0 holds nothing out.
        vocab_size: if set (the loader passes the model's), every batch is checked for ids outside it.
        tokenizer: tokenizer that made the ids: ``"bytes"``, a ``tokenizer.json`` or a folder with one. Each checkpoint
            stores it for ``colossus generate``.

    Raises:
        ValueError: if the file is missing or empty, its size is no multiple of the item size, or its dtype is no
            integer; from `batch`, for an id outside the vocabulary.
        TooLittleData: if this split is too short for one sample.
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
        self._file = user_path(path)
        self._dtype = dtype
        tokens = open_tokens(self._file, dtype, name)
        cut = len(tokens) - round(len(tokens) * validation_fraction)
        self._range = slice(0, cut) if split == "train" else slice(cut, len(tokens))
        super().__init__(tokens[self._range], seq_len, name=f"{name} ({split})", vocab_size=vocab_size, check_ids=True)

    def __getstate__(self) -> dict[str, Any]:
        # a pickled memory map would copy the whole file to each worker; the path is enough
        return {**self.__dict__, "tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tokens = open_tokens(self._file, self._dtype, self.name)[self._range]


def open_tokens(path: Path, dtype: str | None, name: str) -> np.ndarray:
    """Return the ids of a file, mapped: one dim of integers, of ``dtype`` (default uint16) where it is no .npy.

    Raises:
        ValueError: it has none.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ValueError(f"{name} {what} (looked from {os.getcwd()}); set data.path to a file of token ids")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{name} is empty (0 bytes)")
    tokens: np.ndarray | None = None
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        kind = np.dtype(dtype or "uint16") if tokens is None else tokens.dtype
    except Exception as error:  # numpy raises many for a bad file, tokenize.TokenError among them
        raise ValueError(f"{name} cannot be read as .npy, or data.dtype = {dtype!r} is no type: {error}") from error
    if kind.kind not in "iu" or (tokens is not None and tokens.ndim != 1):
        shape = "" if tokens is None else f" {list(tokens.shape)}"
        raise ValueError(f"{name} has {kind}{shape}; tokens are integers in one dimension, for example uint16")
    if size % kind.itemsize and tokens is None:
        raise ValueError(
            f"{name} has {size} bytes, which is not a multiple of {kind.itemsize} (one {kind} token): "
            f"the file is cut off, or data.dtype is not the type it was written with"
        )
    return np.memmap(path, dtype=kind, mode="r") if tokens is None else tokens
