"""Next-token samples cut from one long array of token ids; text and token files are such arrays."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from colossus.data.batch import map_batch

SPLITS = ("train", "validation")


class TooLittleData(ValueError):
    """A dataset that cannot fill a single sample."""


class BatchedDataset(Dataset[dict[str, torch.Tensor]]):
    """A map-style dataset that reads a whole batch at once.

    A subclass gives `__len__` and `batch`; the loader then never collates single samples. `batch` must depend on its
    indices only. (A dataset of another class keeps the usual path, whatever its methods are called.)
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Samples ``indices`` ``[b]`` as tensors whose dim 0 is ``b``."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        sample: dict[str, torch.Tensor] = map_batch(lambda x: x[0], self.batch(np.array([at])))
        return sample


class TokenWindows(BatchedDataset):
    """Windows of ``seq_len + 1`` tokens that start every ``seq_len`` tokens.

    Sample ``i`` is ``inputs = tokens[i * seq_len : (i + 1) * seq_len]`` with the same shifted by one as ``labels``:
    the shift to the next token happens here, before anything splits the sequence. Every token but the first is
    a label exactly once; a tail too short for a window is left out.

    Args:
        tokens: ``[t]`` integers; a memory map stays one.
        seq_len: tokens of a sample.
        name: what the messages call the data.
        vocab_size: ids must be below it; None when nothing is known.
        check_ids: look at each batch for ids outside ``0..vocab_size - 1`` (not needed for bytes).

    Raises:
        TooLittleData: fewer than ``seq_len + 1`` tokens.
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, *, name: str, vocab_size: int | None = None, check_ids: bool = False
    ) -> None:
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
            raise ValueError(f"{name}: seq_len = {seq_len!r} is not a number of tokens (an integer >= 1)")
        if len(tokens) < seq_len + 1:
            raise TooLittleData(
                f"{name} has {len(tokens)} tokens, but one sample needs seq_len + 1 = {seq_len + 1}; "
                f"give more data, a smaller seq_len (model.seq_len), or another share for validation"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.name = name
        self.vocab_size = vocab_size
        self.info: dict[str, Any] = {}
        self._check_ids = check_ids

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """``inputs`` and ``labels``, both int64 ``[b, seq_len]``, for sample numbers ``indices`` ``[b]``."""
        itemsize = self.tokens.itemsize
        # All windows as one overlapping view, so that taking some copies whole rows.
        windows = np.ndarray(
            (len(self), self.seq_len + 1), self.tokens.dtype, self.tokens, 0, (self.seq_len * itemsize, itemsize)
        )
        taken = windows[indices]
        if self._check_ids and taken.size:
            self._raise_on_bad_ids(taken)
        rows = torch.from_numpy(taken.astype(np.int64))
        return {"inputs": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def check_ids(self, max_tokens: int = 1 << 26) -> None:
        """Look at all tokens, or at pieces all over a longer array, for ids outside of the vocabulary.

        Raises:
            ValueError: names such an id.
        """
        if not self._check_ids:
            return
        pieces = max(1, min(64, max_tokens))
        size, count = max_tokens // pieces, len(self.tokens)
        starts = range(0, count, max(size, -(-count // pieces)))
        for start in starts:
            self._raise_on_bad_ids(self.tokens[start : start + size])

    def _raise_on_bad_ids(self, taken: np.ndarray) -> None:
        largest, smallest = int(taken.max()), int(taken.min())
        if smallest < 0:
            raise ValueError(f"{self.name} holds the token id {smallest}; ids must not be negative")
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(
                f"{self.name} holds the token id {largest}, but the vocabulary has {self.vocab_size} "
                f"(ids 0..{self.vocab_size - 1}): set model.vocab_size to {largest + 1} or more, "
                f"or check the dtype of the file"
            )

    def describe(self) -> str:
        """One line for logs."""
        return f"{self.name}: {len(self.tokens):,} tokens, {len(self):,} samples of {self.seq_len}"


def check_split(split: str, validation_fraction: float, name: str) -> None:
    """Raise ValueError on an unknown split or share."""
    if split not in SPLITS:
        raise ValueError(f"{name}: split = {split!r} is not one of {', '.join(map(repr, SPLITS))}")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"{name}: validation_fraction = {validation_fraction} is outside 0 <= share < 1")
    if split == "validation" and validation_fraction == 0:
        raise TooLittleData(f"{name}: validation_fraction = 0, so nothing is held out for validation")
