"""Masks of dropout as a function of each element's sample, token and feature in the whole tensor.

A generator's numbers depend on the number of earlier draws, so its mask depends on the split. Here each element is
hashed by itself, so that a rank draws only its elements, and ranks under another plan draw the same. The hash is
lowbias32 (Wellons, "Prospecting for Hash Functions", 2018) in 32-bit integers that wrap; each gives two elements 16
bits. On a CPU it takes a tenth of the time of ``bernoulli_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from colossus.layers.model_parallel import ModelParallel
from colossus.sharded_tensor.placement import Place, Placement


@dataclass(frozen=True)
class ElementNumbers:
    """The places of the elements of a rank's tensor in the whole tensor, and in the global batch.

    Attributes:
        samples: numbers of the samples in the global batch; a tensor without samples has one, -1.
        rows: for each dim between samples and columns, the numbers of its elements.
        columns: numbers of the elements of the last dim.
    """

    samples: range | Tensor
    rows: tuple[range | Tensor, ...]
    columns: range | Tensor

    @classmethod
    def of(cls, x: Tensor, placement: Placement, parallel: ModelParallel) -> ElementNumbers:
        """Return the numbers for a plain local tensor, whose dim 0 is the samples, or samples times other dims.

        A tensor whose dim 0 is no multiple of the samples, such as one of positions, has none: all samples share its
        mask. Outside an engine dim 0 counts as samples.
        """
        context, info, shape = parallel.context, parallel.batch_info, x.shape
        data = context.grid.axes("data")
        axes = tuple(axis for axis in placement.activation.batch if axis not in data)
        parts = _parts(placement)
        count = info.microbatch_size // context.size(axes) or shape[0]
        of_rows = tuple(axis for part in parts if part.place.dim == 0 for axis in part.axes)
        if of_rows and (not info.microbatch_size or (len(shape) == 2 and shape[0] % count)):
            # [samples, features]: a layout of tokens splits the samples further
            axes, count = axes + of_rows, shape[0]
            parts = [part for part in parts if part.place.dim > 0]
        index, step = context.index(axes), info.sample_step
        first = index * count
        if not info.microbatch_size:
            first += context.index(data) * context.size(axes) * count
        elif step == 1:
            first += info.first_sample + context.rng.microbatch * info.microbatch_size
        else:
            first = info.first_sample + context.rng.microbatch + first * step
        has_samples = shape[0] % count == 0
        dims: list[range | Tensor] = []
        for dim, size in enumerate(shape):
            own = [part for part in parts if part.place.dim == dim]
            outer = count if dim == 0 and has_samples else 1
            if dim > 0 or size > outer or own or not has_samples:
                dims.append(_numbers_along(size // outer, outer, own, x, parallel))
        *rows, columns = dims or [range(1)]
        samples: range | Tensor = range(first, first + count * step, step) if has_samples else range(-1, 0)
        if has_samples and info.sample_numbers is not None:
            samples = info.sample_numbers.narrow(0, index * count, count)
        return cls(samples, tuple(rows), columns)


class _Part(NamedTuple):
    """A split dim, other than that of samples: its place, its axes, and its whole size if the last rank is padded."""

    place: Place
    axes: tuple[str, ...]
    total: int | None = None


def _parts(placement: Placement) -> list[_Part]:
    places, activation = dict(placement.places), placement.activation
    sequence, tokens = placement.parallel.regions.whole.tokens, activation.tokens
    parts = []
    if places.get("sequence") != places.get("tokens"):
        tokens = tuple(axis for axis in tokens if axis not in sequence)
        if "sequence" in places:
            parts.append(_Part(places["sequence"], sequence))
    if "tokens" in places:
        parts.append(_Part(places["tokens"], tokens))
    if "features" in places:
        parts.append(_Part(places["features"], activation.features, placement.num_features))
    return sorted(parts, key=lambda part: part.place.before)


def _numbers_along(size: int, outer: int, parts: Sequence[_Part], x: Tensor, parallel: ModelParallel) -> range | Tensor:
    """Return the numbers in the whole dim of a rank's ``size`` elements; they contain ``outer`` samples."""
    context, sequence, num_tokens = parallel.context, parallel.sequence, parallel.batch_info.num_tokens
    numbers, done = torch.zeros(1, dtype=torch.int32, device=x.device), outer

    def times(own: range | Tensor, total: int) -> Tensor:
        return (numbers.unsqueeze(-1) * total + _as_tensor(own, x.device)).flatten()

    if not parts:
        return range(size)
    for place, axes, total in parts:
        count, ways, index = place.count(x.shape), context.size(axes), context.index(axes)
        own: range | Tensor = range(index * count, (index + 1) * count)
        if sequence is not None and set(axes) & set(sequence.axes):
            own, total = sequence.positions(count, index, ways, x.device), num_tokens
        elif count == size:
            return own
        numbers = times(range(place.before // done), place.before // done)
        numbers = times(own, total or count * ways)
        done = place.before * count
    return times(range(size * outer // done), size * outer // done)


def keep_mask(key: int, numbers: ElementNumbers, p: float, device: torch.device) -> Tensor:
    """Return which elements are kept, [samples, *rows, columns]; each is dropped with probability ``p``, up to 2^-17.

    Args:
        key: 63 bits for everything that the mask depends on beside the elements.
    """
    keys = _mixed(_mixed(_as_tensor(numbers.samples, device) + _signed(key)) + _signed(key >> 32))
    for row in numbers.rows:
        keys = _mixed(keys.unsqueeze(-1) + _as_tensor(row, device))
    columns = numbers.columns
    span = columns if isinstance(columns, range) else range(int(columns.max()) + 1)
    pairs = _as_tensor(range(span.start // 2, (span.stop + 1) // 2), device)
    # mix first: else the rows, whose keys are random, would be windows of one sequence, and some would overlap
    bits = _mixed(keys.unsqueeze(-1) + _mixed(pairs)).view(torch.int16)
    keep = bits >= min(round(p * 2**16), 2**16 - 1) - 2**15
    skipped = span.start % 2
    keep = keep[..., skipped : skipped + len(span)]
    return keep if isinstance(columns, range) else keep.index_select(-1, columns)


def _mixed(x: Tensor) -> Tensor:
    """Return lowbias32 of 32-bit integers, in place. Their shift keeps the sign, so the mask clears it."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed integer."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _as_tensor(numbers: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(numbers, Tensor):
        return numbers.int()
    return torch.arange(numbers.start, numbers.stop, numbers.step, dtype=torch.int32, device=device)
