"""Moving tensors between layouts, and whole tensors into and out of shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.conjugate import conjugate
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Layout
from colossus.layout.moves import moves


def redistribute(x: Tensor, source: Layout, target: Layout, context: ParallelContext) -> Tensor:
    """``x`` moved from one layout to another; differentiable, the gradient makes the conjugate moves.

    Args:
        x: the rank's part, [box of ``source``].

    Returns:
        The rank's part, [box of ``target``]. Every dim that moves must divide.
    """
    sizes = context.grid.sizes
    for move in moves(source.drop_trivial_axes(sizes), target.drop_trivial_axes(sizes)):
        x = conjugate(x, move.forward, move.backward, context.group(move.axes), move.dim, move.to_dim)
    return x


def shard(x: Tensor, layout: Layout, context: ParallelContext) -> Tensor:
    """The rank's buffer of a whole tensor: its box, zeros behind it where the box is uneven.

    No communication and no autograd. [shape] -> [layout.chunk(shape)].
    """
    sizes = context.grid.sizes
    shape = tuple(x.shape)
    box = layout.box(shape, sizes, context.coordinates)
    part = x.detach()[tuple(slice(*span) for span in box)]
    chunk = layout.chunk(shape, sizes)
    if tuple(part.shape) == chunk:
        return part.clone()
    out = x.new_zeros(chunk)
    out[tuple(slice(0, stop - start) for start, stop in box)] = part
    return out


def gather(x: Tensor, layout: Layout, shape: Sequence[int], context: ParallelContext) -> Tensor:
    """The whole tensor on every rank from the ranks' buffers; padding of uneven boxes is dropped. No autograd.

    [layout.chunk(shape)] -> [shape]
    """
    x = x.detach()
    live = layout.drop_trivial_axes(context.grid.sizes)
    if live.partial:
        x = collectives.all_reduce(x, context.group(live.partial)).wait()
    for dim, axes in enumerate(live.dims):
        if axes:
            x = collectives.all_gather(x, context.group(axes), dim).wait()
    x = x[tuple(slice(0, size) for size in shape)]
    return x.clone(memory_format=torch.contiguous_format)
