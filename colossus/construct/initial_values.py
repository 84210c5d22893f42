"""Initial values as functions of (key, full shape, box): the same under every plan, at the cost of the box alone.

Element i of a tensor is word i of the Philox stream of its key (rows padded to whole counters of four words), which can
be advanced to any box. Normals come by inverse CDF in float64: in float32 some would be infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from colossus.construct.allocate import real_value
from colossus.layout.layout import Box

Array = np.ndarray[Any, np.dtype[np.float64]]

_WORDS = 4  # 64-bit words per Philox counter
_BLOCK_WORDS = 1 << 22  # words drawn at a time, to bound the memory beside the result
_SHORT_ROW = 2048  # words that take as long to draw as one call


def _raw(key: int, start: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return ``count`` 64-bit words of the Philox stream of ``key`` from word ``start``, a multiple of four."""
    assert start % _WORDS == 0
    generator = np.random.Philox(key=key)
    generator.advance(start // _WORDS)
    return generator.random_raw(count)


def uniform_box(key: int, shape: tuple[int, ...], box: Box) -> Array:
    """Return uniforms in (0, 1): a box of the tensor of full ``shape`` that belongs to ``key``.

    They are midpoints of 2^52 cells, so never 0 or 1.

    Returns:
        ``[stop - start for each dim of the box]``.
    """
    if not shape:
        return uniform_box(key, (1,), ((0, 1),)).reshape(())
    out = np.empty([stop - start for start, stop in box])
    if out.size == 0:
        return out
    width = shape[-1]
    stride = -(-width // _WORDS) * _WORDS
    first, last = box[-1]
    flat = out.reshape(-1, last - first)
    rows = _row_numbers(shape[:-1], box[:-1])
    # long rows: draw only the words of the box; short rows: draw all words, many rows at a time
    begin, end = (first // _WORDS * _WORDS, last) if stride > _SHORT_ROW and last - first < width else (0, stride)
    block = max(1, _BLOCK_WORDS // stride) if end - begin == stride else 1
    at = 0
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        for start in range(0, run.size, block):
            count = min(block, run.size - start)
            words = _raw(key, int(run[start]) * stride + begin, (count - 1) * stride + end - begin)
            flat[at : at + count] = _to_unit(words.reshape(count, -1)[:, first - begin : last - begin])
            at += count
    return out


def _row_numbers(shape: tuple[int, ...], box: Box) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows = np.zeros(1, dtype=np.int64)
    for size, span in zip(shape, box, strict=True):
        rows = (rows[:, None] * size + np.arange(*span, dtype=np.int64)).reshape(-1)
    return rows


def _to_unit(words: np.ndarray[Any, np.dtype[np.uint64]]) -> Array:
    # 52 bits, so that adding one half is exact: with 53 the last midpoint would round to 1, whose normal is infinite
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float = 0.0

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> Array:
        return np.full([stop - start for start, stop in box], float(self.value))


@dataclass(frozen=True)
class ZeroRow:
    """The values of another initializer, except one row of dim 0, which is zero (the padding of an embedding)."""

    draw: Callable[[int, tuple[int, ...], Box], Array]
    row: int

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> Array:
        out = self.draw(key, shape, box)
        start, stop = box[0]
        if start <= self.row < stop:
            out[self.row - start] = 0.0
        return out


@dataclass(frozen=True)
class Uniform:
    """Uniform in (-bound, bound)."""

    bound: float

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> Array:
        return (uniform_box(key, shape, box) * 2.0 - 1.0) * self.bound


@dataclass(frozen=True)
class Normal:
    """Normal with this standard deviation around ``mean``."""

    std: float
    mean: float = 0.0

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> Array:
        drawn = torch.special.ndtri(torch.from_numpy(uniform_box(key, shape, box)))
        return (drawn * self.std + self.mean).numpy()


@dataclass(frozen=True, eq=False)
class Values:
    """Existing values of the full shape; a rank reads its box of them.

    They stay in memory as long as the model: pass a memory map (``torch.load(path, mmap=True)``) for large ones.
    """

    values: torch.Tensor | np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        if isinstance(self.values, torch.Tensor):
            object.__setattr__(self, "values", real_value(self.values).cpu())

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> Array:
        if tuple(self.values.shape) != shape:
            raise ValueError(f"Values of shape {tuple(self.values.shape)} for a parameter of shape {shape}")
        own = torch.as_tensor(self.values)[tuple(slice(*span) for span in box)]
        return own.detach().double().numpy()


def torch_linear(fan_in: int) -> Uniform:
    """Return the distribution of ``torch.nn.Linear`` for weight and bias: uniform within 1/sqrt(full fan-in)."""
    return Uniform(1.0 / math.sqrt(fan_in) if fan_in > 0 else 0.0)
