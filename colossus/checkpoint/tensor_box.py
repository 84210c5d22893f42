"""What a rank holds of whole tensors: the unit in which checkpoints are written and read; the tensors of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from colossus.checkpoint.tensor_file import dtype_name
from colossus.layout.layout import Box, Layout
from colossus.layout.parameter import LogicalParameter, full_model_order, logical_parameters


@dataclass(frozen=True)
class TensorBox:
    """A rank's box of a tensor.

    Attributes:
        key: of the tensor in the checkpoint.
        shape: full shape.
        box: (start, stop) of every dim; may be empty.
        local: a view of the rank's memory, of the shape of the box.
        writes: whether this rank writes the box, of those that hold it.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    local: Tensor
    writes: bool = True

    @classmethod
    def whole(cls, key: str, tensor: Tensor, *, writes: bool = True) -> TensorBox:
        shape = tuple(tensor.shape)
        return cls(key, shape, tuple((0, size) for size in shape), tensor.detach(), writes)

    @classmethod
    def of_chunk(cls, key: str, shape: Sequence[int], box: Box, chunk: Tensor, *, writes: bool) -> TensorBox:
        """Of a buffer that may be larger than the box, which then fills the beginning of each dim."""
        local = chunk.detach()
        for dim, (start, stop) in enumerate(box):
            if local.shape[dim] != stop - start:
                local = local.narrow(dim, 0, stop - start)
        return cls(key, tuple(shape), box, local, writes)


@dataclass
class RankState:
    """What a rank adds to a checkpoint.

    Attributes:
        tensors: that it holds a box of; it writes some of them.
        values: encoded JSON by path; a path is given by one rank only.
        aliases: other names of tied parameters and buffers -> the name under which the value is.
    """

    tensors: list[TensorBox] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def written(self) -> list[TensorBox]:
        """The tensors that the rank writes, those with larger elements first: so all are aligned in a file."""
        mine = [held for held in self.tensors if held.writes and (held.local.numel() or 0 in held.shape)]
        for held in mine:
            dtype_name(held.local.dtype)
        return sorted(mine, key=lambda held: -held.local.element_size())


def choose_writers(
    tensors: Sequence[tuple[Layout, Sequence[int], int]],
    sizes: Mapping[str, int],
    at: Mapping[str, int],
    apart: Sequence[str] = ("pipeline",),
) -> list[bool]:
    """Of each tensor whether this rank writes its box: of the ranks that hold the same box, the one that has been given
    the fewest bytes so far. Ranks that hold the same tensors come to the same answer, so nothing is exchanged.

    Args:
        tensors: layout, full shape and bytes of an element.
        sizes, at: of all axes, and this rank's coordinates.
        apart: axes along which ranks do not hold the same tensors.
    """
    #: bytes given to each of the ranks with the same boxes, for the axes along which these lie
    given: dict[tuple[str, ...], list[int]] = {}
    chosen = []
    for layout, shape, item_bytes in tensors:
        along = tuple(axis for axis in sizes if axis not in apart and axis not in layout.shard_axes)
        index = 0
        for axis in along:
            index = index * sizes[axis] + at[axis]
        counts = given.setdefault(along, [0] * math.prod(sizes[axis] for axis in along))
        writer = counts.index(min(counts))
        counts[writer] += math.prod(layout.chunk(shape, sizes)) * item_bytes
        chosen.append(writer == index)
    return chosen


#: where an entry stands in the state dict of the whole model: number of its parameter or buffer, number within it
Position = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """A logical parameter, or a buffer, that this rank holds.

    Attributes:
        names: with the place of each; one that is tied has several, of which the first is the model's first.
    """

    held: LogicalParameter | Tensor
    names: dict[str, Position]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)


def entries_of(model: nn.Module) -> dict[str, Entry]:
    """The logical parameters and persistent buffers of this rank by their first names; what is tied is there once."""
    order = full_model_order(model)
    found: dict[tuple[int, str], Entry] = {}
    for number, logical in enumerate(logical_parameters(model, keep_ties=True)):
        entry = found.setdefault((id(logical.parameter), logical.shard_name), Entry(logical, {}))
        entry.names[logical.name] = order[logical.parameter_name], number
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            entry = found.setdefault((id(buffer), ""), Entry(buffer, {}))
            entry.names[name] = order.get(name, len(order)), 0
    return {next(iter(entry.names)): entry for entry in found.values()}
