"""Layout: which mesh axes shard which dim of a tensor, and over which axes its value or gradient is partial.

Per axis a tensor has one of four placements, by their names in torch's DTensor and Meta's spmd_types:

* `Shard` (``dims``): a dim is split over the axis;
* `Partial` (``partial``): the value is the sum of the ranks' values over the axis;
* `Replicate` (``grad_partial``): all ranks have the value, and its gradient is `Partial`: the sum of theirs;
* `Invariant` (an axis not named at all): all ranks have the value and its complete gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from colossus.error_place import located_error

Dims = tuple[tuple[str, ...], ...]
Box = tuple[tuple[int, int], ...]
#: ranges of rows, (start, stop)
Intervals = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """The placements of one tensor.

    Args:
        dims: for each tensor dim the axes that `Shard` it, outermost first; order matters.
        partial: axes over which the value is `Partial`.
        grad_partial: axes over which the value is `Replicate`: each rank has an addend of its gradient.
        stored: axes over which the rows (dim 0) of a rank's shard by ``dims`` are cut further, for storage only: its
            ranks compute with all of them (ZeRO).

    Raises:
        ValueError: an axis is named twice.
    """

    dims: Dims
    partial: tuple[str, ...] = ()
    grad_partial: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = [axis for dim in self.dims for axis in dim] + [*self.partial, *self.grad_partial, *self.stored]
        assert self.dims or not self.stored, "a scalar has no rows"
        if len(set(named)) != len(named):
            twice = sorted({axis for axis in named if named.count(axis) > 1})
            raise located_error(f"layout {self} names axis {', '.join(twice)} twice")

    @classmethod
    def whole(cls, ndim: int) -> Layout:
        """Return the layout of a tensor that is the same on all ranks."""
        return cls(((),) * ndim)

    @cached_property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes that shard some dim, for compute or for storage."""
        return (*(axis for dim in self.dims for axis in dim), *self.stored)

    @property
    def computed(self) -> Layout:
        """The layout with which ranks compute: not cut for storage."""
        return replace(self, stored=())

    def drop_trivial_axes(self, sizes: Mapping[str, int]) -> Layout:
        """Return the layout without axes of one rank."""

        def keep(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if sizes[axis] > 1)

        dims = tuple(map(keep, self.dims))
        return Layout(dims, keep(self.partial), keep(self.grad_partial), keep(self.stored))

    # -- boxes --------------------------------------------------------------------------------------------

    def num_shards(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the number of shards into which each dim is split for compute."""
        return tuple(math.prod(sizes[axis] for axis in dim) for dim in self.dims)

    def chunk(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a rank's buffer, from the full shape: ceil(dim / shards).

        The boxes of the last ranks may fill less of it, or nothing.
        """
        self._check(shape)
        chunk = [-(-size // shards) for size, shards in zip(shape, self.num_shards(sizes), strict=True)]
        if self.stored:
            chunk[0] = -(-chunk[0] // math.prod(sizes[axis] for axis in self.stored))
        return tuple(chunk)

    def box(self, shape: Sequence[int], sizes: Mapping[str, int], at: Mapping[str, int]) -> Box:
        """Return the box of the full tensor at coordinates ``at``: (start, stop) of every dim.

        It may be small or empty. Boxes at different coordinates are the same or disjoint, and together they cover the
        tensor.
        """
        if self.stored:
            (start, stop), *others = self.computed.box(shape, sizes, at)
            rows = self.chunk(shape, sizes)[0]
            first = start + _index(self.stored, sizes, at) * rows
            return ((min(first, stop), min(first + rows, stop)), *others)
        box = []
        for dim, size, chunk in zip(self.dims, shape, self.chunk(shape, sizes), strict=True):
            index = _index(dim, sizes, at)
            box.append((min(index * chunk, size), min((index + 1) * chunk, size)))
        return tuple(box)

    def owns(self, at: Mapping[str, int], axes: Sequence[str]) -> bool:
        """Return whether the rank at ``at`` counts its box in a sum over ``axes``: the first rank with that box."""
        return all(at[axis] == 0 for axis in axes if axis not in self.shard_axes)

    def _check(self, shape: Sequence[int]) -> None:
        if len(shape) != len(self.dims):
            raise located_error(f"layout {self} has {len(self.dims)} dims, the tensor has shape {tuple(shape)}")

    def __str__(self) -> str:
        dims = ", ".join("Shard(" + ",".join(dim) + ")" if dim else "-" for dim in self.dims)
        text = f"[{dims}]"
        if self.partial:
            text += f" Partial({','.join(self.partial)})"
        if self.grad_partial:
            text += f" Replicate({','.join(self.grad_partial)})"
        if self.stored:
            text += f" stored Shard({','.join(self.stored)})"
        return text


def _index(axes: Sequence[str], sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Return the index of a shard along several axes, the first outermost."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index
