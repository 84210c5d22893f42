"""Collectives of tensors that exist in parts: of another length on each rank, or written where they travel from.

How long the parts are is exchanged first (`agree`), once for all tensors that are cut alike. Within a host the parts go
through shared memory: each rank writes all of its own into its slot, and reads what is for it in those of the others.
Nothing is filled up: what is counted is what leaves a rank.

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

from colossus.comm import accounting, collectives, host_staging, log
from colossus.comm.autograd import is_recorded
from colossus.comm.channel import Channel
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
        table: [from][to] of all ranks, where this rank knows it.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    table: tuple[tuple[int, ...], ...] | None

    @property
    def back(self) -> Lengths:
        """Of the answers, a row for each that was received."""
        table = None if self.table is None else tuple(zip(*self.table, strict=True))
        return Lengths(self.received, self.sent, table)


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
    if n == 1:
        only = (sent[0],)
        return Lengths(only, only, (only,)), [list(words)]
    device = host_staging.wire_device(device, group)
    own = torch.tensor([*sent, *words], dtype=torch.int64, device=device)
    channel = channel_for(own, group)
    if channel is not None:
        entry = _record("all_gather", "lengths", own, group, own.nbytes * (n - 1))
        heard = Pending(channel.start(own, torch.stack), entry).wait().tolist()
        table = tuple(tuple(row[:n]) for row in heard)
        lengths = Lengths(table[group.index], tuple(row[group.index] for row in table), table)
        return lengths, [row[n:] for row in heard]
    messages = torch.tensor([[count, *words] for count in sent], dtype=torch.int64, device=device)
    entry = _record("all_to_all", "lengths", messages, group, messages.nbytes // n * (n - 1))
    answers = torch.empty_like(messages)
    work = dist.all_to_all_single(answers, messages, group=group.process_group, async_op=True)
    heard = _finished(work, answers, entry).wait().tolist()
    return Lengths(tuple(sent), tuple(row[0] for row in heard), None), [row[1:] for row in heard]


def all_to_all(x: Tensor, lengths: Lengths, group: AxisGroup, what: str = "rows") -> Pending:
    """Start to give each rank its part of ``x``: [rows sent, ..] -> [rows received, ..], in the order of the group.

    Args:
        x: contiguous, the part for the first rank first; its other dims are the same on all ranks. Not to be changed
            before the result is there.
        what: the bytes are counted as those of the operation ``all_to_all <what>``.
    """
    _require_alike(x, what)
    if group.size == 1:
        return Ready(x)
    if host_staging.is_needed(x, group):
        return host_staging.through_host(x, partial(all_to_all, lengths=lengths, group=group, what=what))
    me, row_bytes = group.index, _row_bytes(x)
    entry = _record("all_to_all", what, x, group, (len(x) - lengths.sent[me]) * row_bytes)
    channel = _channel(x, group, row_bytes)
    if channel is not None and lengths.table is not None:
        ends = [[0, *accumulate(row)] for row in lengths.table]
        spans = [(row[me], row[me + 1]) for row in ends]
        return _ThroughSlots(channel, x, spans, max(row[-1] for row in ends), entry)
    out = x.new_empty((sum(lengths.received), *x.shape[1:]))
    received, sent = list(lengths.received), list(lengths.sent)
    work = dist.all_to_all_single(out, x, received, sent, group=group.process_group, async_op=True)
    return _finished(work, out, entry)


def all_gather(x: Tensor, lengths: Sequence[int], group: AxisGroup, what: str = "rows") -> Pending:
    """Start to collect the tensors of all ranks, one below the other: [own rows, ..] -> [sum of rows, ..].

    Args:
        x: contiguous; not to be changed before the result is there.
        lengths: rows of each rank.
        what: the bytes are counted as those of the operation ``all_gather <what>``.
    """
    _require_alike(x, what)
    n, me = group.size, group.index
    if n == 1:
        return Ready(x)
    if host_staging.is_needed(x, group):
        return host_staging.through_host(x, partial(all_gather, lengths=lengths, group=group, what=what))
    row_bytes = _row_bytes(x)
    entry = _record("all_gather", what, x, group, len(x) * row_bytes * (n - 1))
    channel = _channel(x, group, row_bytes)
    if channel is not None:
        return _ThroughSlots(channel, x, [(0, length) for length in lengths], max(lengths), entry)
    out = x.new_empty((sum(lengths), *x.shape[1:]))
    parts = out.split(list(lengths))
    parts[me].copy_(x)
    messages = []
    for step in range(1, n):
        to, source = (me + step) % n, (me - step) % n
        if len(x):
            messages.append(dist.P2POp(dist.isend, x, group.ranks[to], group.process_group))
        if lengths[source]:
            messages.append(dist.P2POp(dist.irecv, parts[source], group.ranks[source], group.process_group))
    works = dist.batch_isend_irecv(messages) if messages else []

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return out

    return Pending(finish, entry)


class _ThroughSlots(Pending):
    """Parts read out of the slots of all ranks; where one has more rows than a slot holds, in several pieces.

    Args:
        spans: of each rank, which of its rows are for this one.
        most: rows of the rank that has most.
    """

    __slots__ = ("_channel", "_last", "_most", "_out", "_piece", "_spans", "_started", "_x")

    def __init__(
        self, channel: Channel, x: Tensor, spans: Sequence[tuple[int, int]], most: int, entry: log.Entry | None
    ) -> None:
        super().__init__(self._run, entry)
        self._channel, self._x, self._spans, self._most = channel, x.detach(), spans, most
        self._piece = channel.slot_bytes // max(1, _row_bytes(x))
        self._out = x.new_empty((sum(stop - start for start, stop in spans), *x.shape[1:]))
        self._started = 0
        self._last = self._start() if most else None

    def _start(self) -> object:
        first, stop = self._started, min(self._started + self._piece, self._most)
        self._started = stop

        def fill(slot: Tensor) -> None:
            rows = self._x[first:stop]
            slot[: len(rows)].copy_(rows)

        def consume(slots: list[Tensor]) -> Tensor:
            at = 0
            for slot, (start, end) in zip(slots, self._spans, strict=True):
                low, high = max(start, first), min(end, stop)
                if low < high:
                    self._out[at + low - start : at + high - start] = slot[low - first : high - first]
                at += end - start
            return self._out

        return self._channel.start_filled(torch.Size((stop - first, *self._x.shape[1:])), self._x.dtype, fill, consume)

    def _run(self) -> Tensor:
        while self._last is not None:
            self._last()  # type: ignore[operator]
            self._last = self._start() if self._started < self._most else None
        return self._out


def _channel(x: Tensor, group: AxisGroup, row_bytes: int) -> Channel | None:
    channel = channel_for(x[:0], group)
    return channel if channel is not None and row_bytes <= channel.slot_bytes else None


def _require_alike(x: Tensor, what: str) -> None:
    """A rank without ids sends none of int64: those of another dtype would be read as these."""
    assert what != "ids" or x.dtype == torch.int64, x.dtype


def _row_bytes(x: Tensor) -> int:
    return x.shape[1:].numel() * x.element_size()


def _record(operation: str, what: str, x: Tensor, group: AxisGroup, sent: float) -> log.Entry:
    name, axes = f"{operation} {what}", str(group)
    for counter in accounting.listeners:
        counter.add(name, axes, x.dtype, sent)
    return log.record(name, axes, tuple(x.shape), x.dtype)


def _finished(work: dist.Work, out: Tensor, entry: log.Entry) -> Pending:
    def finish() -> Tensor:
        work.wait()
        return out

    return Pending(finish, entry)


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
