"""The tensors that an optimizer treats as one, and the ranks that store their parts.

They are logical parameters; of a stack of matrices (experts), each matrix is one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Box, Layout
from colossus.layout.parameter import logical_name, spec_of


@dataclass(frozen=True, eq=False)
class LogicalTensor:
    """A logical parameter, or one matrix of a stack, and where its parts are.

    Attributes:
        name: full logical name (``blocks.0.attention.query.weight``), with a number in a stack (``experts.up[3]``).
        shape: full shape.
        parameter: the stored parameter that has this rank's part in it.
        layout: layout of the logical parameter.
        boxes: box of each rank of the group: (start, stop) of every dim; may be empty.
        rows: rows of the logical parameter in dim 0 of the stored one.
        number: index of the matrix in this rank's part of the stack; None where there is no stack.
        own: this rank's box.
    """

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    layout: Layout
    boxes: tuple[Box, ...]
    rows: tuple[int, int]
    number: int | None
    own: Box

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local(self, buffer: Tensor) -> Tensor:
        """Return a view of this rank's part: of the parameter, or of a buffer of its shape (gradient, momentum)."""
        if not self.shape:
            return buffer
        part = buffer[self.rows[0] : self.rows[1]]
        if self.number is not None:
            inside = 0 <= self.number < len(part)
            part = part[self.number] if inside else part.new_empty([stop - start for start, stop in self.own])
        for dim, (start, stop) in enumerate(self.own):
            if part.shape[dim] != stop - start:
                part = part.narrow(dim, 0, stop - start)
        return part


class Holders:
    """The ranks that store the parameters of an optimizer and have the same sums of gradients.

    Args:
        context: this rank's context.
        axes: axes along which these ranks lie; stages of a pipeline store other parameters.
        tables: ids of the stored parameters whose rows stand for tokens or classes: of embeddings and output layers.
        sparse: ids of those with sparse gradients. They have rules of their own (``optimizer.tables``) and are not
            among the tensors.

    Attributes:
        group: group of those ranks, in the same order on all.
    """

    def __init__(
        self,
        context: ParallelContext,
        axes: Iterable[str],
        tables: Collection[int] = (),
        sparse: Collection[int] = (),
    ) -> None:
        self.context, self.tables, self.sparse = context, frozenset(tables), frozenset(sparse)
        along = set(axes)
        self.axes = tuple(axis for axis in context.grid.names if axis in along and context.grid.sizes[axis] > 1)
        self.group: AxisGroup = context.group(self.axes)
        self.coordinates = [context.grid.coordinates(rank) for rank in self.group.ranks]

    def tensors(self, params: Iterable[nn.Parameter]) -> list[LogicalTensor]:
        """Return the tensors of stored parameters, in their order: the same list on all ranks of the group."""
        return [tensor for param in params if id(param) not in self.sparse for tensor in self._tensors_of(param)]

    def _tensors_of(self, param: nn.Parameter) -> list[LogicalTensor]:
        spec, sizes = spec_of(param), self.context.grid.sizes
        tensors = []
        for shard in spec.shards:
            name = logical_name(spec.name, shard.name)
            boxes = [spec.layout.box(shard.shape, sizes, coordinates) for coordinates in self.coordinates]
            own = boxes[self.group.index]
            if not spec.is_stack:
                tensors.append(
                    LogicalTensor(name, shard.shape, param, spec.layout, tuple(boxes), shard.rows, None, own)
                )
                continue
            for number in range(shard.shape[0]):
                boxes_within = tuple(_within(box, number) for box in boxes)
                tensors.append(
                    LogicalTensor(
                        f"{name}[{number}]", shard.shape[1:], param, spec.layout, boxes_within, shard.rows,
                        number - own[0][0], boxes_within[self.group.index],
                    )
                )  # fmt: skip
        return tensors

    def same_copy(self, tensor: LogicalTensor, index: int) -> list[int]:
        """Return the ranks of the group whose parts make up the copy of a tensor that rank ``index`` has a part of.

        They differ from that rank only along the axes that split the tensor.
        """
        own = self.coordinates[index]
        fixed = [axis for axis in self.axes if axis not in tensor.layout.shard_axes]
        return [
            other
            for other, coordinates in enumerate(self.coordinates)
            if all(coordinates[axis] == own[axis] for axis in fixed) and box_numel(tensor.boxes[other])
        ]


def _within(box: Box, number: int) -> Box:
    """Return a rank's box of one matrix of a stack, from its box of the stack."""
    (start, stop), *rest = box
    return tuple(rest) if start <= number < stop else tuple((0, 0) for _ in rest)


def box_numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


class Sums:
    """Sums over logical tensors whose parts are on several ranks.

    Each element is counted once; one all-reduce serves all tensors.
    """

    def __init__(self, tensors: Sequence[LogicalTensor], holders: Holders) -> None:
        sizes = holders.context.grid.sizes
        cut = {axis for tensor in tensors for axis in tensor.layout.shard_axes if sizes[axis] > 1}
        axes = tuple(axis for axis in holders.axes if axis in cut)
        self.group, coordinates = holders.context.group(axes), holders.context.coordinates
        #: 1 where this rank is the first that has its part, else 0: [tensors]
        self.counts = torch.tensor(
            [float(tensor.layout.owns(coordinates, axes)) for tensor in tensors],
            dtype=torch.float64, device=holders.context.device,
        )  # fmt: skip

    def squares(self, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's sum of squares of each tensor, float64 [tensors]: 0 where another rank counts the part."""
        if not parts:
            return self.counts.new_zeros(0)
        low = any(part.dtype.itemsize < 4 for part in parts)  # their norms would be rounded, or overflow
        norms = torch._foreach_norm(list(parts), 2, torch.float32) if low else torch._foreach_norm(list(parts))
        return torch.stack([norm.double().to(self.counts.device) for norm in norms]).square() * self.counts

    def over_ranks(self, addends: Tensor) -> Tensor:
        """Return the sum of a flat tensor over the ranks that split some tensor."""
        return collectives.all_reduce(addends, self.group, owned=True).wait()
