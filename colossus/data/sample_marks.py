"""Marks of samples, by which data ranks see whether they read the same data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from colossus.data.batch import Batch, batch_size_of, slice_batch
from colossus.nest import leaves

#: path of a leaf -> a hash of it in each of some samples
Marks = Mapping[str, tuple[int, ...]]

#: samples that are marked
NUM_MARKED = 8


def marks_of(samples: Sequence[Any]) -> Marks:
    """Return the marks of the first samples: of tensors, arrays, numbers and text, where all of them have it."""
    of_samples = [
        {path: mark for path, leaf in leaves(sample) if (mark := _mark(leaf)) is not None}
        for sample in samples[:NUM_MARKED]
    ]
    first = of_samples[0] if of_samples else {}
    return {path: tuple(of[path] for of in of_samples) for path in first if all(path in of for of in of_samples)}


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


def telling(marks: Sequence[Marks]) -> list[str]:
    """Return the leaves that tell samples apart on each rank, as labels and tokens do and a mask of ones does not."""
    return [path for path in marks[0] if all(len(set(of_rank.get(path, ()))) > 1 for of_rank in marks)]


def differing(marks: Sequence[Marks]) -> list[str]:
    """Return the leaves that are not the same on all ranks.

    None where another leaf is the same: then the samples are, and what differs is drawn at random.
    """
    paths = telling(marks)
    differ = [path for path in paths if len({of_rank[path] for of_rank in marks}) > 1]
    return differ if len(differ) == len(paths) else []


def repeating(read: Callable[[], Marks]) -> set[str] | None:
    """Return the leaves that are the same when samples are read twice: nothing at random is in them. None where they
    cannot be read.
    """
    try:
        first, second = read(), read()
    except Exception:  # of the user's own code: what it reads cannot be compared
        return None
    return {path for path, marks in first.items() if second.get(path) == marks}
