"""Boxes of whole tensors, in which a checkpoint is written and read, and the tensors of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from colossus.checkpoint.tensor_file import dtype_name
from colossus.layout.layout import Box, Layout
from colossus.layout.parameter import LogicalParameter, full_model_order, logical_parameters, reference_prefixes


@dataclass(frozen=True)
class TensorBox:
    """A rank's box of a tensor.

    Attributes:
        key: key of the tensor in the checkpoint.
        shape: full shape.
        box: (start, stop) of every dim; may be empty.
        local: a view of the rank's memory, of the shape of the box.
        writes: whether this rank writes the box, of the ranks that have it.
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
        """Return the box of a buffer, which may be larger than the box and has it at the beginning of each dim."""
        local = chunk.detach()
        for dim, (start, stop) in enumerate(box):
            if local.shape[dim] != stop - start:
                local = local.narrow(dim, 0, stop - start)
        return cls(key, tuple(shape), box, local, writes)


@dataclass
class RankState:
    """The state that a rank adds to a checkpoint.

    Attributes:
        tensors: boxes of tensors, of which it writes some.
        values: encoded JSON by path; each path comes from one rank only.
        aliases: other names of tied parameters and buffers -> the name under which the value is.
    """

    tensors: list[TensorBox] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def written(self) -> list[TensorBox]:
        """Return the boxes that the rank writes, those with larger elements first: so all are aligned in a file."""
        mine = [box for box in self.tensors if box.writes and (box.local.numel() or 0 in box.shape)]
        for box in mine:
            dtype_name(box.local.dtype)
        return sorted(mine, key=lambda box: -box.local.element_size())


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


#: position in the state dict of the whole model: number of the parameter or buffer, number within it
Position = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """A logical parameter or a buffer of this rank.

    Attributes:
        value: the parameter or buffer.
        names: its names with the position of each; a tied one has several, the model's first name first.
    """

    value: LogicalParameter | Tensor
    names: dict[str, Position]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


def entries_of(model: nn.Module) -> dict[str, Entry]:
    """Return the logical parameters and persistent buffers of this rank by first name; a tied one is there once.

    Those of a frozen reference inside the model (`colossus.models.reference`) are not there.
    """
    order = full_model_order(model)
    entries: dict[tuple[int, str], Entry] = {}
    for number, logical in enumerate(logical_parameters(model, keep_ties=True)):
        entry = entries.setdefault((id(logical.parameter), logical.shard_name), Entry(logical, {}))
        entry.names[logical.name] = order[logical.parameter_name], number
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            entry = entries.setdefault((id(buffer), ""), Entry(buffer, {}))
            entry.names[name] = order.get(name, len(order)), 0
    named = {next(iter(entry.names)): entry for entry in entries.values()}
    other = reference_prefixes(model)
    return {name: entry for name, entry in named.items() if not name.startswith(other)} if other else named
