"""All-gather and reduce-scatter shard by shard, so that one shard is computed with while the next is on its way.

Shards come in ring order, starting at the rank itself. Besides what the caller keeps at most two are in memory: the one
in use and the one on its way. Through shared memory they are used where they lie, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm import host_staging
from colossus.comm.collectives import record
from colossus.comm.ring import exchange
from colossus.comm.shared_memory import channel_for
from colossus.context.groups import AxisGroup


def stream_all_gather(x: Tensor, group: AxisGroup) -> Iterator[tuple[int, Tensor]]:
    """(rank, its ``x``) for every rank of the group, each valid until the next is asked for.

    Counts as one all-gather. All ranks must iterate to the end.
    """
    if host_staging.is_needed(x, group):
        for rank, shard in stream_all_gather(host_staging.to_host(x), group):
            yield rank, x if rank == group.index else host_staging.to_device(shard, x.device)
        return
    entry = record("all_gather", x, group)
    channel = channel_for(x, group)
    order = [(group.index + step) % group.size for step in range(1, group.size)]
    if channel is not None:
        gathering = channel.gather(x)
        yield group.index, x
        for rank in order:
            yield rank, gathering.shard(rank)
        gathering.close()
    else:
        x = x.contiguous()
        coming = _receive(x, group, 1)
        yield group.index, x
        for step, rank in enumerate(order, 2):
            shard, works = coming
            if step < group.size:
                coming = _receive(x, group, step)
            _wait(works)
            yield rank, shard
    if entry is not None:
        entry.done = True


def _receive(x: Tensor, group: AxisGroup, step: int) -> tuple[Tensor, list[dist.Work]]:
    """Start to receive the shard of the rank ``step`` further on; ``x`` goes to the rank as far behind."""
    shard = torch.empty_like(x)
    return shard, exchange(group, (-step, x, shard))


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


#: writes this rank's addend of a rank's shard into a tensor
Compute = Callable[[int, Tensor], None]


def stream_reduce_scatter(compute: Compute, like: Tensor, shape: Sequence[int], group: AxisGroup) -> Tensor:
    """This rank's shard of a sum over the group, of which every rank computes its addend shard by shard.

    ``compute(rank, out)`` writes this rank's addend of the shard that ``rank`` keeps. The own shard is computed last,
    while the others are on their way. Counts as one reduce-scatter.

    Args:
        like: gives dtype and device.
        shape: of a shard, the same on all ranks.
    """
    n, me = group.size, group.index
    own = like.new_empty(tuple(shape))
    if host_staging.is_needed(like, group):

        def compute_and_copy(rank: int, out: Tensor) -> None:
            compute(rank, own)
            out.copy_(own)

        host = stream_reduce_scatter(compute_and_copy, host_staging.empty((), like.dtype, like.device), shape, group)
        return host_staging.to_device(host, like.device, own)
    entry = record("reduce_scatter", own, group, num_chunks=n)
    channel = channel_for(own, group)
    if channel is not None and own.nbytes * n <= channel.slot_bytes:
        scattering = channel.scatter(own.shape, own.dtype)
        for step in range(1, n):
            rank = (me + step) % n
            compute(rank, scattering.outgoing(rank))
            scattering.notify(rank)
        compute(me, own)
        for step in range(1, n):
            own.add_(scattering.received((me - step) % n))
        scattering.close()
    else:
        total: Tensor | None = None
        coming: tuple[Tensor, Tensor, list[dist.Work]] | None = None
        for step in range(1, n):
            outgoing, incoming = torch.empty_like(own), torch.empty_like(own)
            compute((me + step) % n, outgoing)
            if coming is not None:
                total = _add(total, coming)
            coming = outgoing, incoming, exchange(group, (step, outgoing, incoming))
        compute(me, own)
        if coming is not None:
            total = _add(total, coming)
        if total is not None:
            own.add_(total)
    if entry is not None:
        entry.done = True
    return own


def _add(total: Tensor | None, coming: tuple[Tensor, Tensor, list[dist.Work]]) -> Tensor:
    _, incoming, works = coming
    _wait(works)
    return incoming if total is None else total.add_(incoming)
