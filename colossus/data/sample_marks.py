"""Marks (hashes) of samples, by which data ranks compare their data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from colossus.data.batch import Batch, batch_size_of, slice_batch
from colossus.nest import leaves

#: path of a leaf -> its hash in each of some samples
Marks = Mapping[str, tuple[int, ...]]

#: samples that are marked
NUM_MARKED = 8


def marks_of(samples: Sequence[Any]) -> Marks:
    """Return the marks of the first samples: of leaves that all have, if they are tensors, arrays, numbers or text."""
    by_sample = [
        {path: mark for path, leaf in leaves(sample) if (mark := _mark(leaf)) is not None}
        for sample in samples[:NUM_MARKED]
    ]
    first = by_sample[0] if by_sample else {}
    return {
        path: tuple(marks[path] for marks in by_sample) for path in first if all(path in marks for marks in by_sample)
    }


def marks_of_batch(batch: Batch) -> Marks:
    """Return the marks of the first samples of a batch with the samples in dim 0."""
    size = min(batch_size_of(batch), NUM_MARKED)
    return marks_of([slice_batch(batch, row, row + 1) for row in range(size)])


def _mark(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        is_plain = leaf.layout is torch.strided and leaf.device.type == "cpu"
        if not is_plain or leaf.is_quantized or leaf.is_complex() or not leaf.numel():
            return None
        leaf = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return zlib.crc32(leaf.tobytes())
    return zlib.crc32(repr(leaf).encode()) if isinstance(leaf, str | bytes | int | float) else None


def distinguishing(marks: Sequence[Marks]) -> list[str]:
    """Return the leaves that distinguish samples on each rank; labels and tokens do, a mask of ones does not."""
    return [path for path in marks[0] if all(len(set(of_one.get(path, ()))) > 1 for of_one in marks)]


def differing(marks: Sequence[Marks]) -> list[str]:
    """Return the leaves that differ between ranks.

    It is empty if another leaf is equal: then the samples are the same, and the leaves that differ are random.
    """
    paths = distinguishing(marks)
    differ = [path for path in paths if len({of_one[path] for of_one in marks}) > 1]
    return differ if len(differ) == len(paths) else []


def repeating(read: Callable[[], Marks]) -> set[str] | None:
    """Return the leaves that are the same when samples are read twice, so not random; None if that fails."""
    try:
        first, second = read(), read()
    except Exception:  # raised by the user's code, whose samples cannot be compared then
        return None
    return {path for path, marks in first.items() if second.get(path) == marks}
