"""The part that a rank has of a named tensor, in which a checkpoint is written and read; the file of a rank's parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from colossus.checkpoint.tensor_file import dtype_name, make_header, write_file
from colossus.layout.layout import Box, Intervals, Layout

#: position in the state dict of the whole model: number of the parameter or buffer, number within it
Position = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Part:
    """A rank's box of a named tensor: of a parameter, a buffer, or state that is kept for a parameter.

    Attributes:
        key: key of the tensor in the checkpoint; of a part of a model, its first full name.
        shape: full shape.
        box: (start, stop) of every dim; may be empty.
        memory: tensor of this rank that has the box, at the beginning of each dim; of a part of a model, the parameter
            or the buffer itself.
        writes: whether this rank writes the box, and state of its shape (a momentum), of the ranks that have it.
        rows: rows of ``memory`` that have the box, where it has several tensors; None: all.
        layout: layout of a model's parameter or buffer; None for any other tensor.
        intervals: see `colossus.layout.parameter.ParameterSpec`.
        names: all names of a model's parameter or buffer, with the position of each; a tied one has several.
        writes_scalars: whether this rank writes state that all ranks have alike (the number of updates).
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    memory: Tensor
    writes: bool = True
    rows: tuple[int, int] | None = None
    layout: Layout | None = None
    intervals: Intervals | None = None
    names: Mapping[str, Position] = field(default_factory=dict)
    writes_scalars: bool = True

    @classmethod
    def whole(
        cls, key: str, tensor: Tensor, *, writes: bool = True, names: Mapping[str, Position] | None = None
    ) -> Part:
        """Return the part of a rank that has the whole tensor."""
        shape = tuple(tensor.shape)
        return cls(key, shape, tuple((0, size) for size in shape), tensor.detach(), writes, names=names or {})

    @property
    def size(self) -> tuple[int, ...]:
        """Sizes of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.size) * self.memory.element_size()

    @property
    def is_split(self) -> bool:
        return self.layout is not None and bool(self.layout.shard_axes)

    @property
    def shape_by_row(self) -> tuple[int, ...]:
        """Full shape of a tensor with one number for each row of dim 0: [rows, 1, ..]."""
        return by_row(self.shape)

    @property
    def local(self) -> Tensor:
        """The box: a view of the memory."""
        local = self.memory if self.rows is None else self.memory[self.rows[0] : self.rows[1]]
        for dim, size in enumerate(self.size):
            if local.shape[dim] != size:
                local = local.narrow(dim, 0, size)
        return local.detach()

    def at(self, key: str, memory: Tensor | None = None) -> Part:
        """Return the part of another tensor that belongs to this part of a parameter.

        Args:
            key: key of the other tensor.
            memory: a tensor of the shape of this part's memory, or [its rows, 1, ..], which ranks with other columns
                have alike; None: the parameter itself, under another key.
        """
        shape, box, writes = self.shape, self.box, self.writes
        if memory is not None and memory.shape != self.memory.shape:
            shape = self.shape_by_row
            writes = writes and all(start == 0 for start, _ in box[1:])
            box = (box[0], *((0, 1) for _ in box[1:]))
        names = self.names if memory is None else {}
        return Part(
            key, shape, box, (self.memory if memory is None else memory).detach(), writes, self.rows, names=names
        )


def by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor with one number for each row of a tensor of this shape: [rows, 1, ..]."""
    return (*shape[:1], *(1 for _ in shape[1:]))


def written(parts: Iterable[Part]) -> list[Part]:
    """Return the parts that the rank writes, those with larger elements first: so all are aligned in a file."""
    mine = [part for part in parts if part.writes and (0 in part.shape or all(part.size))]
    for part in mine:
        dtype_name(part.dtype)
    return sorted(mine, key=lambda part: -part.memory.element_size())


def choose_writers(
    tensors: Sequence[tuple[Layout, Sequence[int], int]],
    sizes: Mapping[str, int],
    at: Mapping[str, int],
    apart: Sequence[str] = ("pipeline",),
) -> list[bool]:
    """Return, for each tensor, whether this rank writes its box.

    Of the ranks that have the same box, the one with the fewest bytes so far writes it. Ranks that have the same
    tensors compute the same answer, so nothing is exchanged.

    Args:
        tensors: layout, full shape and bytes of an element.
        sizes: sizes of all axes.
        at: this rank's coordinates.
        apart: axes along which ranks have different tensors.
    """
    #: axes along which ranks have the same box -> bytes of each of these ranks
    load: dict[tuple[str, ...], list[int]] = {}
    chosen = []
    for layout, shape, item_bytes in tensors:
        along = tuple(axis for axis in sizes if axis not in apart and axis not in layout.shard_axes)
        index = 0
        for axis in along:
            index = index * sizes[axis] + at[axis]
        counts = load.setdefault(along, [0] * math.prod(sizes[axis] for axis in along))
        writer = counts.index(min(counts))
        counts[writer] += math.prod(layout.chunk(shape, sizes)) * item_bytes
        chosen.append(writer == index)
    return chosen


def aliases_in(parts: Iterable[Part]) -> dict[str, str]:
    """Return the other names of a model's tied parameters and buffers -> the first name of each."""
    named = ((next(iter(part.names)), part.names) for part in parts if len(part.names) > 1)
    return {alias: first for first, names in named for alias in names if alias != first}


def write_parts(
    path: Path, parts: Sequence[Part], tensors: Iterable[Tensor], on_block: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write and flush a file of these parts; ``tensors`` yields their values one after the other.

    Returns:
        The file's part of the manifest.
    """
    times = Counter(part.key for part in parts)
    names = [part.key if times[part.key] == 1 else f"{part.key}[{part.box[0][0]}:{part.box[0][1]}]" for part in parts]
    header = make_header([(name, part.dtype, part.size) for name, part in zip(names, parts, strict=True)])
    crc = write_file(path, header, tensors, on_block)
    rows = [
        [part.key, dtype_name(part.dtype), part.shape, header.offsets[name], [low for low, _ in part.box], part.size]
        for name, part in zip(names, parts, strict=True)
    ]
    return {"file": [path.name, header.num_bytes, crc], "tensors": rows}
