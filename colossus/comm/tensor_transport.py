"""The ways in which tensors travel between the ranks of a group by c10d: through NCCL, gloo, a fake backend.

`colossus.comm.channel` is the way through shared memory, and `colossus.comm.host_staging` that from a device through
the host. `colossus.comm.collectives` chooses, checks, counts and logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from colossus import torch_versions
from colossus.comm.pending import Pending, Ready
from colossus.context.groups import AxisGroup

_functional = torch.ops._c10d_functional
#: from this size of the whole tensor on, gloo gathers and scatters by messages, which is at least twice as fast
_MESSAGES_BYTES = 1 << 20

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


class TensorTransport:
    """The collectives of c10d, in place. Every other transport has the same methods.

    Each starts a collective. Arguments and results are those of `colossus.comm.collectives`
    and `colossus.comm.uneven`; dims are not negative.
    """

    def __init__(self, group: AxisGroup) -> None:
        self.group = group

    def all_reduce(self, x: Tensor, op: str, owned: bool) -> Pending:
        """Sum ``x``, or take the maximum; ``owned``: it is contiguous, and the result may overwrite it."""
        if not owned:
            x = x.clone(memory_format=torch.contiguous_format)
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return _waits([dist.all_reduce(x, reduce_op, group=self.group.process_group, async_op=True)], x)

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        n = self.group.size
        return self._gather(x.contiguous()).then(lambda out: _unstack(out, n, dim))

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        return self._scatter(_chunks(x, self.group.size, dim))

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        n = self.group.size
        return self._exchange(_chunks(x, n, split_dim).flatten(0, 1)).then(lambda out: _unstack(out, n, concat_dim))

    def broadcast(self, x: Tensor, source: int) -> Pending:
        group = self.group
        return _waits([dist.broadcast(x, group.ranks[source], group=group.process_group, async_op=True)], x)

    def _gather(self, x: Tensor) -> Pending:
        out = x.new_empty((self.group.size * x.shape[0], *x.shape[1:]))
        work = torch_versions.all_gather_single(out, x, group=self.group.process_group, async_op=True)
        return _waits([work], out, reads=x)

    def _scatter(self, chunks: Tensor) -> Pending:
        own, group = chunks.new_empty(chunks.shape[1:]), self.group.process_group
        work = torch_versions.reduce_scatter_single(own, chunks.flatten(0, 1), group=group, async_op=True)
        return _waits([work], own, reads=chunks)

    def _exchange(self, chunks: Tensor) -> Pending:
        received = torch.empty_like(chunks)
        work = dist.all_to_all_single(received, chunks, group=self.group.process_group, async_op=True)
        return _waits([work], received, reads=chunks)

    # -- parts of any length --------------------------------------------------------------------------------

    def exchange_rows(self, x: Tensor, lengths: Lengths) -> Pending:
        out = x.new_empty((sum(lengths.received), *x.shape[1:]))
        received, sent = list(lengths.received), list(lengths.sent)
        work = dist.all_to_all_single(out, x, received, sent, group=self.group.process_group, async_op=True)
        return _waits([work], out, reads=x)

    def gather_rows(self, x: Tensor, lengths: Sequence[int]) -> Pending:
        out = x.new_empty((sum(lengths), *x.shape[1:]))
        return _waits(_send_to_all(x, out.split(list(lengths)), self.group), out, reads=x)

    # -- tensors that the caller writes into what is sent -----------------------------------------------------

    def gather_filled(self, x: Tensor, fill: Fill, take: Take) -> Pending:
        fill(x)
        return self.all_gather(x, 0).then(lambda whole: taken(take, [whole.view(self.group.size, len(x))]))

    def scatter_filled(self, x: Tensor, fill: Fill, take: Take) -> Pending:
        fill(x)
        return self.reduce_scatter(x, 0).then(lambda row: taken(take, [row.view(-1)]))


class Alone(TensorTransport):
    """The tensors of a group of one rank, which go nowhere."""

    def _stay(self, x: Tensor, *args: Any) -> Pending:
        return Ready(x)

    all_reduce = all_gather = reduce_scatter = all_to_all = broadcast = exchange_rows = gather_rows = cast(Any, _stay)


class Gloo(TensorTransport):
    """The collectives of c10d between processes without devices, with large tensors in messages."""

    def _gather(self, x: Tensor) -> Pending:
        n = self.group.size
        if n * x.nbytes < _MESSAGES_BYTES:
            return super()._gather(x)
        return self.gather_rows(x, [len(x)] * n)

    def _scatter(self, chunks: Tensor) -> Pending:
        if chunks.nbytes < _MESSAGES_BYTES:
            return super()._scatter(chunks)
        shape = chunks.shape
        return self._exchange(chunks.flatten(0, 1)).then(lambda addends: addends.view(shape).sum(0))


class Functional(TensorTransport):
    """torch's functional collectives, out of place, for what traces or records tensor operations.

    `broadcast`, `exchange_rows` and `gather_rows` are those of `TensorTransport`, which write in place.

    Selective activation checkpointing, say, would otherwise cache a value that is overwritten later, and gradients
    would be silently wrong.
    """

    def all_reduce(self, x: Tensor, op: str, owned: bool) -> Pending:
        return _waits_for(_functional.all_reduce(x, op, self.group.name))

    def _gather(self, x: Tensor) -> Pending:
        return _waits_for(_functional.all_gather_into_tensor(x, self.group.size, self.group.name))

    def _scatter(self, chunks: Tensor) -> Pending:
        flat, group = chunks.flatten(0, 1), self.group
        return _waits_for(_functional.reduce_scatter_tensor(flat, "sum", group.size, group.name))

    def _exchange(self, chunks: Tensor) -> Pending:
        splits = [chunks.shape[0] // self.group.size] * self.group.size
        return _waits_for(_functional.all_to_all_single(chunks, splits, splits, self.group.name))


def _send_to_all(x: Tensor, parts: Sequence[Tensor], group: AxisGroup) -> list[dist.Work]:
    """Start an all-gather by messages: every rank sends ``x`` to every other one.

    Args:
        x: this rank's tensor; its length may differ between ranks.
        parts: the memory for the tensors of all ranks, in group order; this rank's own is copied.
    """
    n, me = group.size, group.index
    parts[me].copy_(x)
    messages = []
    for step in range(1, n):
        to, source = (me + step) % n, (me - step) % n
        if x.numel():
            messages.append(dist.P2POp(dist.isend, x, group.ranks[to], group.process_group))
        if parts[source].numel():
            messages.append(dist.P2POp(dist.irecv, parts[source], group.ranks[source], group.process_group))
    return dist.batch_isend_irecv(messages) if messages else []


def _waits(works: Sequence[dist.Work], out: Tensor, reads: Tensor | None = None) -> Pending:
    """Return the result ``out`` of works of c10d, whose input ``reads`` lives until it is there."""

    def finish(reads: Tensor | None = reads) -> Tensor:
        for work in works:
            work.wait()
        return out

    return Pending(finish)


def _waits_for(out: Tensor) -> Pending:
    return Pending(lambda: _functional.wait_tensor(out))


def taken(take: Take, tensors: list[Tensor]) -> Tensor:
    """Call ``take``, and return a tensor of no meaning."""
    take(tensors)
    return tensors[0]


def _chunks(x: Tensor, n: int, dim: int) -> Tensor:
    """Return the chunks along ``dim`` one below the other: [.., n s, ..] -> contiguous [n, .., s, ..]."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).contiguous()


def _unstack(x: Tensor, n: int, dim: int) -> Tensor:
    """Turn a concatenation of n tensors along dim 0, [n s0, ..], into one along ``dim``."""
    if dim == 0:
        return x
    return x.unflatten(0, (n, x.shape[0] // n)).movedim(0, dim).flatten(dim, dim + 1)
