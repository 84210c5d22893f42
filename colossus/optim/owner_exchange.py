"""Owners of tensors: the one rank that has the whole tensor for a moment, and how its parts get there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colossus.comm import uneven
from colossus.comm.pending import Pending
from colossus.layout.layout import Box
from colossus.optim.logical_tensors import Holders, LogicalTensor, box_numel


def choose_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each tensor: the most expensive first, each to the rank with the least so far.

    The rank with the most has at most 4/3 of the best case (LPT, Graham 1969).

    Args:
        costs: cost of each tensor.
        ranks: number of ranks.
    """
    load = [0.0] * ranks
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owner = load.index(min(load))
        owners[number] = owner
        load[owner] += costs[number]
    return owners


class Exchange:
    """The exchange of tensors: to their owners, and from there to all ranks that store parts of them.

    An owner receives each element once, from the ranks that together have a whole copy (`Holders.same_copy`). It sends
    each rank its own part. A rank sends nothing to itself: `bytes_sent`.

    Args:
        tensors: the tensors.
        owners: owner of each tensor, by index in the group.
        holders: the ranks that store parts.
    """

    def __init__(self, tensors: Sequence[LogicalTensor], owners: Sequence[int], holders: Holders) -> None:
        self.group, me = holders.group, holders.group.index
        self.tensors = list(tensors)
        n = self.group.size
        senders = [holders.same_copy(tensor, owner) for tensor, owner in zip(tensors, owners, strict=True)]
        self.owned = [number for number, owner in enumerate(owners) if owner == me]
        #: by rank, numbers of the tensors whose parts are sent to it, whose parts it sends, and whose values it sends
        self._sent = [[k for k, owner in enumerate(owners) if owner == to and me in senders[k]] for to in range(n)]
        self._received = [[k for k in self.owned if source in senders[k]] for source in range(n)]
        self._from_owner = [[k for k, owner in enumerate(owners) if owner == source] for source in range(n)]
        to_owners, back = ([[0] * n for _ in range(n)] for _ in range(2))
        for k, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
            for rank in range(n):
                size = box_numel(tensor.boxes[rank])
                back[owner][rank] += size
                if rank in senders[k]:
                    to_owners[rank][owner] += size
        self._to_owners, self._back = (uneven.Lengths.of(table, me) for table in (to_owners, back))

    def bytes_sent(self, item_bytes: int) -> tuple[int, int]:
        """Return the bytes that this rank sends: parts to owners, and values from this owner.

        Over all ranks that is, of each tensor, the elements that its owner does not store, and those that all other
        ranks store.
        """
        me = self.group.index
        ways = (self._to_owners.sent, self._back.sent)
        to_owners, back = ((sum(sent) - sent[me]) * item_bytes for sent in ways)
        return to_owners, back

    def to_owners(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to send the parts of all tensors, of one dtype, to the owners.

        Args:
            parts: this rank's part of each tensor.

        Returns:
            A function that waits for the tensors that this rank owns, and returns them whole, in their order.
        """
        if self.group.size == 1:
            return lambda: list(parts)
        x = _flat([parts[k] for numbers in self._sent for k in numbers], parts)
        pending = uneven.all_to_all(x, self._to_owners, self.group, what="to owners")

        def wait() -> list[Tensor]:
            arrived, offset = pending.wait(), 0
            whole = {k: arrived.new_empty(self.tensors[k].shape) for k in self.owned}
            for source, numbers in enumerate(self._received):
                for k in numbers:
                    into = _part(whole[k], self.tensors[k].boxes[source])
                    into.copy_(arrived[offset : offset + into.numel()].view(into.shape))
                    offset += into.numel()
            return [whole[k] for k in self.owned]

        return wait

    def to_holders(self, whole: Sequence[Tensor], like: Tensor) -> Callable[[], list[Tensor]]:
        """Start to send all ranks their parts.

        Args:
            whole: the tensors that this rank owns, in their order, of one dtype.
            like: a tensor of that dtype and device.

        Returns:
            A function that waits for this rank's part of each tensor, and returns them.
        """
        if self.group.size == 1:
            return lambda: list(whole)
        values = dict(zip(self.owned, whole, strict=True))
        leaving = [_part(values[k], self.tensors[k].boxes[to]) for to in range(self.group.size) for k in self.owned]
        pending: Pending = uneven.all_to_all(_flat(leaving, [like]), self._back, self.group, what="from owners")

        def wait() -> list[Tensor]:
            arrived, offset = pending.wait(), 0
            parts: dict[int, Tensor] = {}
            for numbers in self._from_owner:
                for k in numbers:
                    shape = [stop - start for start, stop in self.tensors[k].own]
                    size = box_numel(self.tensors[k].own)
                    parts[k] = arrived[offset : offset + size].view(shape)
                    offset += size
            return [parts[k] for k in range(len(self.tensors))]

        return wait


def _flat(parts: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like[0].new_empty(0)


def _part(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(start, stop) for start, stop in box)]


def in_buckets(
    tensors: Sequence[LogicalTensor], costs: Sequence[float], holders: Holders, limit: int
) -> list[tuple[list[int], Exchange]]:
    """Return exchanges of some tensors each, which run one after the other, and the numbers of their tensors.

    The most expensive tensors are first. Each bucket has work for all owners: each owns at most ``limit`` elements of
    it, or one tensor.
    """
    owners = choose_owners(costs, holders.group.size)
    buckets: list[list[int]] = [[]]
    load = [0] * holders.group.size
    for number in sorted(range(len(tensors)), key=lambda k: -costs[k]):
        size = tensors[number].numel
        if load[owners[number]] and load[owners[number]] + size > limit:
            buckets.append([])
            load = [0] * holders.group.size
        buckets[-1].append(number)
        load[owners[number]] += size
    return [
        (numbers, Exchange([tensors[k] for k in numbers], [owners[k] for k in numbers], holders))
        for numbers in buckets
        if numbers
    ]
