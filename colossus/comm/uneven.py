"""Collectives of tensors whose lengths differ between ranks, and of many small tensors that travel together.

Ranks exchange the lengths first (`agree`), once for all tensors that are cut alike. Within a host the parts go through
shared memory where a slot can hold them: each rank writes all of its parts into its slot, and reads the parts for it in
the slots of the others. There is no padding, and the count is that of the bytes that leave a rank.

`gather_filled` and `reduce_scatter_filled` let the caller write many small tensors into the buffer that is sent, and
read them from the one that is received. Through shared memory these are the only copies.
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
from colossus.comm.host_transfer import beside_products
from colossus.comm.pending import Pending, Ready
from colossus.comm.shared_memory import channel_for
from colossus.context.groups import AxisGroup

#: a function that writes a flat tensor
Fill = Callable[[Tensor], object]
#: a function that reads tensors, which are valid during the call only
Take = Callable[[list[Tensor]], None]


@dataclass(frozen=True)
class Lengths:
    """The numbers of rows that the ranks of a group send each other.

    Attributes:
        sent: rows that this rank sends to each rank.
        received: rows that this rank receives from each rank.
        matrix: rows by [from][to], of all ranks.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    matrix: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, matrix: Sequence[Sequence[int]], index: int) -> Lengths:
        """Return the lengths of the rank at this index of the group."""
        return cls(tuple(matrix[index]), tuple(row[index] for row in matrix), tuple(map(tuple, matrix)))

    @property
    def back(self) -> Lengths:
        """The lengths of the answers, when each rank sends back one row for each row that it received."""
        return Lengths(self.received, self.sent, tuple(zip(*self.matrix, strict=True)))


def agree(
    sent: Sequence[int], group: AxisGroup, device: torch.device, words: Sequence[int] = ()
) -> tuple[Lengths, list[list[int]]]:
    """Exchange with all ranks of the group how many rows each sends to each.

    Args:
        sent: rows that this rank sends to each rank of the group.
        group: the ranks that take part.
        device: the device of the rows, from which the lengths travel where the backend can send from it.
        words: integers that are sent to all ranks beside the lengths, as many on each rank.

    Returns:
        The lengths, and the words of each rank.
    """
    n = group.size
    rows = [[*sent, *words]]
    if n > 1:
        own = torch.tensor(rows[0], dtype=torch.int64, device=host_staging.wire_device(device, group))
        rows = collectives.all_gather(own, group, what="lengths").wait().view(n, -1).tolist()
    return Lengths.of([row[:n] for row in rows], group.index), [row[n:] for row in rows]


def all_to_all(x: Tensor, lengths: Lengths, group: AxisGroup, what: str = "rows") -> Pending:
    """Start to send each rank its part of ``x``: [rows sent, ..] -> [rows received, ..], in group order.

    Args:
        x: contiguous, the part for the first rank first; its dtype and other dims are the same on all ranks. It must
            not change before the result is there.
        lengths: rows of each part.
        group: the ranks that take part.
        what: a label; the bytes are counted under ``all_to_all <what>``.
    """
    if group.size == 1:
        return Ready(x)
    if host_staging.is_needed(x, group):
        return host_staging.through_host(x, partial(all_to_all, lengths=lengths, group=group, what=what))
    me = group.index
    leaving = (len(x) - lengths.sent[me]) * _row_bytes(x)
    entry = collectives.record("all_to_all", x, group, what=what, sent=leaving)
    ends = [[0, *accumulate(row)] for row in lengths.matrix]
    pending = _through_slots(x, [(row[me], row[me + 1]) for row in ends], [row[-1] for row in ends], group, entry)
    if pending is not None:
        return pending
    out = x.new_empty((sum(lengths.received), *x.shape[1:]))
    received, sent = list(lengths.received), list(lengths.sent)
    work = dist.all_to_all_single(out, x, received, sent, group=group.process_group, async_op=True)
    return collectives.work_pending([work], out, entry, reads=x)


def all_gather(x: Tensor, lengths: Sequence[int], group: AxisGroup, what: str = "rows") -> Pending:
    """Start to concatenate the tensors of all ranks along dim 0: [own rows, ..] -> [sum of rows, ..].

    Args:
        x: contiguous; it must not change before the result is there.
        lengths: rows of each rank.
        group: the ranks that take part.
        what: a label; the bytes are counted under ``all_gather <what>``.
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
    return collectives.work_pending(works, out, entry, reads=x)


def _through_slots(
    x: Tensor, spans: Sequence[tuple[int, int]], rows: Sequence[int], group: AxisGroup, entry: log.Entry | None
) -> Pending | None:
    """Start to read parts out of the slots of all ranks; return None where some rank's rows do not fit in a slot.

    Args:
        x: this rank's rows.
        spans: for each rank, the range of its rows that this rank reads.
        rows: the number of rows of each rank.
        group: the ranks that take part.
        entry: the collective's entry in the log.
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
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    group: AxisGroup,
    fill: Fill,
    take: Take,
    *,
    is_from_host: bool = False,
) -> Pending:
    """Start an all-gather of a flat tensor of ``size`` elements that ``fill`` writes.

    ``wait()`` calls ``take`` with tensors of shape [ranks, size], of all ranks in group order: one of all ranks, or
    through shared memory one of each. Its own result has no meaning.

    Args:
        size, dtype, device: of the tensor.
        group: the ranks that take part.
        fill: writes the tensor.
        take: reads those of all ranks.
        is_from_host: ``fill`` copies from the host to a device: the products that the device is given from here on do
            not wait for the copy.
    """
    x = torch.empty(size, dtype=dtype, device=device)
    channel = None if is_recorded() or group.size == 1 else channel_for(x, group)
    if channel is not None:
        entry = collectives.record("all_gather", x, group)
        start = channel.start_filled(
            x.shape, dtype, fill, lambda shards: _take(take, [shard.view(1, size) for shard in shards])
        )
        return Pending(start, entry)
    if not is_from_host or group.size == 1:
        fill(x)
        return collectives.all_gather(x, group).then(lambda whole: _take(take, [whole.view(group.size, size)]))
    with beside_products(device):
        fill(x)
        pending = collectives.all_gather(x, group)

    def take_on_current_stream(whole: Tensor) -> Tensor:
        if device.type != "cpu":
            whole.record_stream(torch.get_device_module(device).current_stream(device))
        return _take(take, [whole.view(group.size, size)])

    return pending.then(take_on_current_stream)


def reduce_scatter_filled(
    size: int, dtype: torch.dtype, device: torch.device, group: AxisGroup, fill: Fill, take: Take
) -> Pending:
    """Start a reduce-scatter of a tensor of shape [ranks, size] that ``fill`` writes.

    ``wait()`` calls ``take`` with addends whose sum is this rank's row; its own result has no meaning. The number of
    addends depends on the way that the tensors travelled. Their order is the same on all ranks.
    """
    x = torch.empty(group.size, size, dtype=dtype, device=device)
    channel = None if is_recorded() or group.size == 1 else channel_for(x, group)
    if channel is not None:
        entry = collectives.record("reduce_scatter", x, group)
        start = channel.start_filled(
            x.shape, dtype, fill, lambda stacked: _take(take, [rows[group.index] for rows in stacked])
        )
        return Pending(start, entry)
    fill(x)
    return collectives.reduce_scatter(x, group).then(lambda row: _take(take, [row.view(-1)]))


def _take(take: Take, tensors: list[Tensor]) -> Tensor:
    take(tensors)
    return tensors[0]
