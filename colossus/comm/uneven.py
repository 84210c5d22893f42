"""Collectives of tensors that exist in parts: of another length on each rank, or written where they travel from.

How long the parts are is exchanged first (`agree`), once for all tensors that are cut alike. Within a host the parts go
through shared memory, where a slot holds them: each rank writes all of its own into its slot, and reads what is for it
in those of the others. Nothing is filled up: what is counted is what leaves a rank.

Many small tensors that travel together (`gather_filled`, `reduce_scatter_filled`) are written to where they travel from
and read where they arrive: through shared memory these are the only copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm import collectives, host_staging, log
from colossus.comm.autograd import is_recorded
from colossus.comm.pending import Pending, Ready
from colossus.comm.shared_memory import channel_for
from colossus.context.groups import AxisGroup

#: writes a flat tensor
Fill = Callable[[Tensor], object]
#: reads flat tensors, which are valid during the call only
Take = Callable[[list[Tensor]], None]


@dataclass(frozen=True)
class Lengths:
    """How many rows the ranks of a group send each other.

    Attributes:
        sent: to each rank.
        received: from each rank.
        table: [from][to] of all ranks.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]

    @property
    def back(self) -> Lengths:
        """Of the answers, a row for each that was received."""
        return Lengths(self.received, self.sent, tuple(zip(*self.table, strict=True)))


def agree(
    sent: Sequence[int], group: AxisGroup, device: torch.device, words: Sequence[int] = ()
) -> tuple[Lengths, list[list[int]]]:
    """Tell each rank how many rows it will get, and get to know how many come from each.

    Args:
        sent: to each rank of the group.
        words: integers that all ranks of the group are to hear, as many on each.

    Returns:
        The lengths, and the words of each rank.
    """
    n = group.size
    heard = [[*sent, *words]]
    if n > 1:
        own = torch.tensor(heard[0], dtype=torch.int64, device=host_staging.wire_device(device, group))
        heard = collectives.all_gather(own, group, what="lengths").wait().view(n, -1).tolist()
    table = tuple(tuple(row[:n]) for row in heard)
    lengths = Lengths(table[group.index], tuple(row[group.index] for row in table), table)
    return lengths, [row[n:] for row in heard]


def all_to_all(x: Tensor, lengths: Lengths, group: AxisGroup, what: str = "rows") -> Pending:
    """Start to give each rank its part of ``x``: [rows sent, ..] -> [rows received, ..], in the order of the group.

    Args:
        x: contiguous, the part for the first rank first; its dtype and other dims are the same on all ranks. Not to be
            changed before the result is there.
        what: the bytes are counted as those of the operation ``all_to_all <what>``.
    """
    if group.size == 1:
        return Ready(x)
    if host_staging.is_needed(x, group):
        return host_staging.through_host(x, partial(all_to_all, lengths=lengths, group=group, what=what))
    me = group.index
    leaving = (len(x) - lengths.sent[me]) * _row_bytes(x)
    entry = collectives.record("all_to_all", x, group, what=what, sent=leaving)
    ends = [[0, *accumulate(row)] for row in lengths.table]
    pending = _through_slots(x, [(row[me], row[me + 1]) for row in ends], [row[-1] for row in ends], group, entry)
    if pending is not None:
        return pending
    out = x.new_empty((sum(lengths.received), *x.shape[1:]))
    received, sent = list(lengths.received), list(lengths.sent)
    work = dist.all_to_all_single(out, x, received, sent, group=group.process_group, async_op=True)
    return collectives.work_pending([work], out, entry)


def all_gather(x: Tensor, lengths: Sequence[int], group: AxisGroup, what: str = "rows") -> Pending:
    """Start to collect the tensors of all ranks, one below the other: [own rows, ..] -> [sum of rows, ..].

    Args:
        x: contiguous; not to be changed before the result is there.
        lengths: rows of each rank.
        what: the bytes are counted as those of the operation ``all_gather <what>``.
    """
    if group.size == 1:
        return Ready(x)
    if host_staging.is_needed(x, group):
        return host_staging.through_host(x, partial(all_gather, lengths=lengths, group=group, what=what))
    entry = collectives.record("all_gather", x, group, what=what)
    pending = _through_slots(x, [(0, length) for length in lengths], lengths, group, entry)
    if pending is not None:
        return pending
    out = x.new_empty((sum(lengths), *x.shape[1:]))
    works = collectives.send_to_all(x, out.split(list(lengths)), group)
    return collectives.work_pending(works, out, entry)


def _through_slots(
    x: Tensor, spans: Sequence[tuple[int, int]], rows: Sequence[int], group: AxisGroup, entry: log.Entry | None
) -> Pending | None:
    """Parts read out of the slots of all ranks; None where that cannot be, or a rank has more rows than a slot holds.

    Args:
        spans: of each rank, which of its rows are for this one.
        rows: of each rank.
    """
    channel = channel_for(x[:0], group)
    if channel is None or max(rows) * _row_bytes(x) > channel.slot_bytes:
        return None
    own = x.detach()

    def consume(slots: list[Tensor]) -> Tensor:
        return torch.cat([slot[start:stop] for slot, (start, stop) in zip(slots, spans, strict=True)])

    shape = torch.Size((max(rows), *x.shape[1:]))
    return Pending(channel.start_filled(shape, x.dtype, lambda slot: slot[: len(own)].copy_(own), consume), entry)


def _row_bytes(x: Tensor) -> int:
    return x.shape[1:].numel() * x.element_size()


def gather_filled(
    size: int, dtype: torch.dtype, device: torch.device, group: AxisGroup, fill: Fill, take: Take
) -> Pending:
    """All-gather of a flat tensor of ``size`` elements that ``fill`` writes; ``take`` gets those of all ranks.

    ``wait()`` returns nothing of use: all is done when ``take`` has been called.
    """
    x = torch.empty(size, dtype=dtype, device=device)
    channel = None if is_recorded() or group.size == 1 else channel_for(x, group)
    if channel is not None:
        entry = collectives.record("all_gather", x, group)
        return Pending(channel.start_filled(x.shape, dtype, fill, lambda shards: _taken(take, shards)), entry)
    fill(x)
    return collectives.all_gather(x, group).then(lambda whole: _taken(take, list(whole.split(size))))


def reduce_scatter_filled(
    size: int, dtype: torch.dtype, device: torch.device, group: AxisGroup, fill: Fill, take: Take
) -> Pending:
    """Reduce-scatter of [ranks, size] that ``fill`` writes; ``take`` gets addends whose sum is this rank's row.

    How many addends there are depends on the way the tensors travelled; their order does not depend on the rank.
    """
    x = torch.empty(group.size, size, dtype=dtype, device=device)
    channel = None if is_recorded() or group.size == 1 else channel_for(x, group)
    if channel is not None:
        entry = collectives.record("reduce_scatter", x, group)
        start = channel.start_filled(
            x.shape, dtype, fill, lambda stacked: _taken(take, [rows[group.index] for rows in stacked])
        )
        return Pending(start, entry)
    fill(x)
    return collectives.reduce_scatter(x, group).then(lambda row: _taken(take, [row.view(-1)]))


def _taken(take: Take, tensors: list[Tensor]) -> Tensor:
    take(tensors)
    return tensors[0]
