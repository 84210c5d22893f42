"""This rank's boxes of the model's parameters, and which of them it writes to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from colossus.checkpoint.entries import Entry, entries_of
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.shares import WriterShares
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Box, Layout
from colossus.layout.parameter import LogicalParameter


@dataclass(frozen=True)
class ParameterBox:
    """A logical parameter and the rank's box of it: one of several where the rank holds it in ranges of rows.

    Attributes:
        name: full logical name, the first of a tied one.
        aliases: its other names on this rank.
        logical: where it lives.
        box: (start, stop) of every dim of the full shape; may be empty.
        writes: whether this rank writes it, and what else has its shape (its momentum).
        writes_scalars: whether it writes what is the same on all ranks (the number of its updates).
    """

    name: str
    aliases: tuple[str, ...]
    logical: LogicalParameter
    box: Box
    writes: bool
    writes_scalars: bool

    @property
    def parameter(self) -> nn.Parameter:
        return self.logical.parameter

    def held(self, key: str, buffer: Tensor | None = None) -> HeldTensor:
        """Of the parameter, or of a buffer of the shape of the torch parameter that holds it."""
        local = self.logical.local(buffer)
        return HeldTensor.of_chunk(key, self.logical.shape, self.box, local, writes=self.writes)

    @property
    def shape_by_row(self) -> tuple[int, ...]:
        """Full shape of what has a number for each row of dim 0: [rows, 1, ..]."""
        return (*self.logical.shape[:1], *(1 for _ in self.logical.shape[1:]))

    def held_by_row(self, key: str, buffer: Tensor) -> HeldTensor:
        """Of a buffer [rows of the torch parameter that holds it, 1, ..]; ranks with other columns have the same."""
        rows, *columns = self.box
        box = (rows, *((0, 1) for _ in columns))
        is_first = all(start == 0 for start, _ in columns)
        local = self.logical.local(buffer)
        return HeldTensor.of_chunk(key, self.shape_by_row, box, local, writes=self.writes and is_first)


def parameter_boxes(
    model: nn.Module, context: ParallelContext, counted_elsewhere: Iterable[nn.Parameter], *, replicas_differ: bool
) -> list[ParameterBox]:
    """The boxes of all parameters as the rank stores them, in the order of the model. No communication.

    Args:
        counted_elsewhere: tied parameters, as stored, that an earlier pipeline stage holds and writes.
        replicas_differ: each data rank has parameters of its own, and writes all of them.
    """
    sizes, at = context.grid.sizes, context.coordinates
    shares = WriterShares(sizes, at, ("pipeline", *(context.grid.axes("data") if replicas_differ else ())))
    elsewhere = {id(param) for param in counted_elsewhere}
    named = [
        (name, tuple(entry.names)[1:], entry.held)
        for name, entry in entries_of(model).items()
        if isinstance(entry.held, LogicalParameter)
    ]
    writes: dict[str, tuple[bool, bool]] = {}
    # the largest first, so that the small ones even out what ranks have
    for name, _, logical in sorted(named, key=lambda each: -math.prod(each[2].shape)):
        item, is_here = logical.parameter.element_size(), id(logical.parameter) not in elsewhere
        box, scalars = shares.takes(logical.layout, logical.shape, item), shares.takes(Layout.whole(0), (), item)
        writes[name] = box and is_here, scalars and is_here
    return [
        ParameterBox(name, aliases, part, box, writes[name][0], is_first and writes[name][1])
        for name, aliases, logical in named
        for part, box, is_first in _boxes(logical, logical.layout.box(logical.shape, sizes, at))
    ]


def _boxes(logical: LogicalParameter, box: Box) -> Iterator[tuple[LogicalParameter, Box, bool]]:
    """What a rank holds of a parameter, maybe in several ranges of its rows; whether it is the first of them.

    Args:
        box: as the layout says.
    """
    if logical.intervals is None:
        yield logical, box, True
        return
    at = 0
    for number, (start, stop) in enumerate(logical.intervals or [(0, 0)]):
        yield replace(logical, rows=(at, at + stop - start)), ((start, stop), *box[1:]), number == 0
        at += stop - start


def buffers_of(model: nn.Module) -> dict[str, Entry]:
    """The persistent buffers of this rank, by first name."""
    return {name: entry for name, entry in entries_of(model).items() if isinstance(entry.held, Tensor)}
