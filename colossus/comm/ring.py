"""All-gather and reduce-scatter part by part, so that a part is computed with while the next one travels.

Parts come in ring order, one's own first. At most two are held beside what the caller keeps: the one that is used and
the one that is on its way. Through shared memory they are used where they lie, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm.collectives import message_pair, record
from colossus.comm.shared_memory import channel_for
from colossus.context.groups import AxisGroup


def gather_parts(x: Tensor, group: AxisGroup) -> Iterator[tuple[int, Tensor]]:
    """(rank, its ``x``) for every rank of the group, each valid until the next is asked for.

    Counts as one all-gather. All ranks must read to the end.
    """
    entry = record("all_gather", x, group, group.size - 1)
    channel = channel_for(x, group)
    order = [(group.index + step) % group.size for step in range(1, group.size)]
    if channel is not None:
        parts = channel.share(x)
        yield group.index, x
        for rank in order:
            yield rank, parts.part(rank)
        parts.close()
    else:
        x = x.contiguous()
        coming = _receive(x, group, 1)
        yield group.index, x
        for step, rank in enumerate(order, 2):
            here, works = coming
            if step < group.size:
                coming = _receive(x, group, step)
            _wait(works)
            yield rank, here
    if entry is not None:
        entry.done = True


def _receive(x: Tensor, group: AxisGroup, step: int) -> tuple[Tensor, list[dist.Work]]:
    """Start to take the part of the rank ``step`` further on; the rank as far back takes mine."""
    here = torch.empty_like(x)
    return here, _start(x, here, group, to=group.index - step, source=group.index + step)


def _start(mine: Tensor, theirs: Tensor, group: AxisGroup, *, to: int, source: int) -> list[dist.Work]:
    return dist.batch_isend_irecv(message_pair(mine, theirs, group, to=to, source=source))


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


#: writes the part for a rank into a tensor
Compute = Callable[[int, Tensor], None]


def reduce_parts(compute: Compute, like: Tensor, shape: Sequence[int], group: AxisGroup) -> Tensor:
    """The sum over the group of what its ranks compute for this one: ``compute(rank, out)`` writes the part for a rank.

    One's own is computed last, while the others travel. Counts as one reduce-scatter.

    Args:
        like: gives dtype and device.
        shape: of a part, the same on all ranks.
    """
    n, me = group.size, group.index
    own = like.new_empty(tuple(shape))
    entry = record("reduce_scatter", own, group, n - 1)
    channel = channel_for(own, group)
    if channel is not None and own.nbytes * n <= channel.slot_bytes:
        exchange = channel.exchange(own.shape, own.dtype)
        for step in range(1, n):
            rank = (me + step) % n
            compute(rank, exchange.place(rank))
            exchange.send(rank)
        compute(me, own)
        for step in range(1, n):
            own.add_(exchange.received((me - step) % n))
        exchange.close()
    else:
        total: Tensor | None = None
        travelling: tuple[Tensor, Tensor, list[dist.Work]] | None = None
        for step in range(1, n):
            part, theirs = torch.empty_like(own), torch.empty_like(own)
            compute((me + step) % n, part)
            if travelling is not None:
                total = _add(total, travelling)
            travelling = part, theirs, _start(part, theirs, group, to=me + step, source=me - step)
        compute(me, own)
        if travelling is not None:
            total = _add(total, travelling)
        if total is not None:
            own.add_(total)
    if entry is not None:
        entry.done = True
    return own


def _add(total: Tensor | None, travelling: tuple[Tensor, Tensor, list[dist.Work]]) -> Tensor:
    _, theirs, works = travelling
    _wait(works)
    return theirs if total is None else total.add_(theirs)
