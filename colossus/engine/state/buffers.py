"""Persistent buffers: the same on all ranks, or (running statistics of a rank's own samples) each rank's own."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from torch import nn

from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import host_bytes
from colossus.checkpoint.together import on_all_ranks
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.engine.state.boxes import buffers_of
from colossus.engine.state.of_ranks import own_path


def own_key(rank: int, name: str) -> str:
    """Of a buffer of a rank that differs from the first rank's."""
    return own_path(rank, f"buffers/{name}")


def held_buffers(model: nn.Module, context: ParallelContext) -> Iterator[HeldTensor]:
    """The buffers under their names as the first rank has them; those of ranks that differ under names of their own.

    Collective.
    """
    buffers = buffers_of(model)
    world = context.group(context.grid.names)
    sums = on_all_ranks(
        world,
        lambda: {name: zlib.crc32(host_bytes(entry.held)) for name, entry in buffers.items()},  # type: ignore[arg-type]
    )
    of_ranks = all_gather_object(sums, world)
    for name, entry in buffers.items():
        first = next(rank for rank, theirs in enumerate(of_ranks) if name in theirs)
        if context.rank == first:
            yield HeldTensor.whole(f"model/{name}", entry.held)  # type: ignore[arg-type]
        elif sums[name] != of_ranks[first][name]:
            yield HeldTensor.whole(own_key(context.rank, name), entry.held)  # type: ignore[arg-type]


def read_buffer(reader: CheckpointReader, name: str, buffer: HeldTensor, rank: int | None) -> None:
    """Fill a buffer, under the plan it was saved with (``rank`` is not None) by what the rank itself had."""
    own = own_key(rank, name) if rank is not None else ""
    key = own if own in reader.manifest.tensors else buffer.key
    reader.read_box(key, buffer.box, buffer.local)
