"""Moves of tensors between layouts, and of whole tensors into and out of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.conjugate import conjugate
from colossus.context.parallel_context import ParallelContext
from colossus.layout.activation import Activation
from colossus.layout.layout import Intervals, Layout
from colossus.layout.moves import moves

L = TypeVar("L", Layout, Activation)


def move(x: Tensor, source: L, target: L, context: ParallelContext) -> Tensor:
    """Return ``x`` moved from one layout to another; differentiable, the gradient makes the conjugate moves.

    Args:
        x: on each rank its box under ``source``, without padding. Every dim that a move splits or gathers must divide.
        source, target: layouts of the dims, in which axes of one rank may be, or of the roles of an activation, in
            which they may not.

    Returns:
        On each rank its box under ``target``.

    Raises:
        ValueError: there is no way between the layouts (see `moves`), or a dim does not divide.
    """
    if source == target:
        return x
    if isinstance(source, Activation) and isinstance(target, Activation):
        steps = moves(source.at(x.dim()), target.at(x.dim()))
    else:
        steps = moves(*(layout.drop_trivial_axes(context.grid.sizes) for layout in (source, target)))
    for step in steps:
        x = conjugate(x, step.forward, step.backward, context.group(step.axes), step.dim, step.to_dim)
    return x


def shard(x: Tensor, layout: Layout, context: ParallelContext, intervals: Intervals | None = None) -> Tensor:
    """Return this rank's buffer of a whole tensor: its box, followed by zeros if the box is smaller than the buffer.

    No communication and no autograd. [shape] -> [layout.chunk(shape)], or [rows of all intervals, ..].

    Args:
        intervals: see `gather`.
    """
    if intervals is not None:
        x = shard(x, layout.computed, context)
        return torch.cat([x[start:stop] for start, stop in intervals] or [x[:0]])
    sizes = context.grid.sizes
    shape = tuple(x.shape)
    box = layout.box(shape, sizes, context.coordinates)
    values = x.detach()[tuple(slice(*span) for span in box)]
    chunk = layout.chunk(shape, sizes)
    if tuple(values.shape) == chunk:
        return values.clone()
    out = x.new_zeros(chunk)
    out[tuple(slice(0, stop - start) for start, stop in box)] = values
    return out


def gather(
    x: Tensor, layout: Layout, shape: Sequence[int], context: ParallelContext, intervals: Intervals | None = None
) -> Tensor:
    """Return the whole tensor from the ranks' buffers, on every rank and on the device of the context.

    The padding of uneven boxes is dropped. No autograd. [layout.chunk(shape)] -> [shape]

    Args:
        intervals: the ranges of rows (dim 0) that this rank stores, consecutive in ``x``, for a tensor whose rows only
            storage cuts; None: the ranges of the layout.
    """
    x = x.detach().to(context.device)  # ZeRO may store rows on the host, but collectives run on the device
    layout = layout.drop_trivial_axes(context.grid.sizes)
    if layout.partial:
        x = collectives.all_reduce(x, context.group(layout.partial)).wait()
    if layout.stored and intervals is not None:
        x = collectives.all_reduce(_in_place(x, intervals, shape[0]), context.group(layout.stored), owned=True).wait()
    elif layout.stored:
        rows = layout.computed.chunk(shape, context.grid.sizes)[0]
        x = collectives.all_gather(x, context.group(layout.stored)).wait()[:rows]
    for dim, axes in enumerate(layout.dims):
        if axes:
            x = collectives.all_gather(x, context.group(axes), dim).wait()
    x = x[tuple(slice(0, size) for size in shape)]
    return x.clone(memory_format=torch.contiguous_format)


def _in_place(x: Tensor, intervals: Intervals, num_rows: int) -> Tensor:
    """Return the rows of this rank at their places among zeros: [num_rows, ..]."""
    out = x.new_zeros((num_rows, *x.shape[1:]))
    at = 0
    for start, stop in intervals:
        out[start:stop] = x[at : at + stop - start]
        at += stop - start
    return out
