"""Sums of one bucket of gradients over ranks: by one all-reduce, or first inside hosts and then between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.comm.pending import Pending, Staged, Stages
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.machine import host_id

#: the axes under which the bytes between hosts are counted
BETWEEN = "data between hosts"


class BucketSum(Protocol):
    """The sum of one bucket over ranks, started once in each step."""

    def start(self, flat: Tensor) -> Pending:
        """Start to sum ``flat``: gradients, and then a flag for each parameter. It may be overwritten."""


#: a function of (parameters, axes, dtype) that makes the sum of their bucket over these axes
SumFactory = Callable[[Sequence[nn.Parameter], tuple[str, ...], torch.dtype], BucketSum]


class FlatSum:
    """A sum by one all-reduce."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group

    def start(self, flat: Tensor) -> Pending:
        return collectives.all_reduce(flat, self._group, owned=True)


class TwoLevelSum:
    """A reduce-scatter inside each host, an all-reduce between hosts, and an all-gather inside each host.

    So each rank sends only its share of a bucket over the network (TorchMPI's Cartesian communicators).

    Args:
        inner: the ranks of this host.
        outer: one rank of each host.
    """

    def __init__(self, inner: AxisGroup, outer: AxisGroup) -> None:
        self._inner, self._outer = inner, outer

    def start(self, flat: Tensor) -> Pending:
        return Staged(self.stages(flat))

    def stages(self, flat: Tensor) -> Stages:
        num_inner = self._inner.size
        share = yield collectives.reduce_scatter(padded(flat, num_inner), self._inner)
        total = yield collectives.all_reduce(share, self._outer, owned=True)
        whole = yield collectives.all_gather(total, self._inner)
        return whole[: flat.numel()]


def padded(flat: Tensor, divisor: int) -> Tensor:
    """Return ``flat`` with zeros at its end, so that its length divides by ``divisor``."""
    missing = -flat.numel() % divisor
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


class Hosts:
    """The hosts of the data ranks, as sets of indices along data; all sets have one size.

    Args:
        sets: the indices of each host, in the order of their positions on it.
    """

    def __init__(self, context: ParallelContext, sets: Sequence[Sequence[int]]) -> None:
        self._context, self.sets = context, [list(indices) for indices in sets]
        self._host_of = {index: host for host, indices in enumerate(self.sets) for index in indices}

    @classmethod
    def of_size(cls, context: ParallelContext, per_host: int) -> Hosts:
        """Return hosts of ``per_host`` consecutive indices along data."""
        size = context.size("data")
        return cls(context, [range(first, first + per_host) for first in range(0, size, per_host)])

    @classmethod
    def detect(cls, context: ParallelContext, what: str = "parallel.strategy = 'hierarchical'") -> Hosts:
        """Return the hosts that the ranks run on, by their names. Collective over all ranks.

        Two replicas of several ranks share a host where each rank of the one is on the host of its counterpart.

        Args:
            what: the feature that asks, for the error.

        Raises:
            ValueError: on all ranks, where hosts have different numbers of data ranks.
        """
        names = all_gather_object(host_id(), context.group(context.grid.names))
        names_by_index: dict[int, list[str]] = {}
        for rank, name in enumerate(names):
            names_by_index.setdefault(context.grid.index(rank, "data"), []).append(name)
        sets: dict[tuple[str, ...], list[int]] = {}
        for index, replica_names in sorted(names_by_index.items()):
            sets.setdefault(tuple(replica_names), []).append(index)
        sizes = [len(indices) for indices in sets.values()]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{what} needs the same number of data ranks on each host, but the hosts have "
                f"{', '.join(map(str, sizes))}: start as many processes on each host, set hosts= or per_host=, or use "
                f"'all_reduce'"
            )
        return cls(context, list(sets.values()))

    def host_of(self, index: int) -> int:
        """Return the number of the host of an index along data."""
        return self._host_of[index]

    @property
    def has_two_levels(self) -> bool:
        """Return whether there are several hosts with several ranks each, so that sums have two levels."""
        return len(self.sets) > 1 and self.per_host > 1

    @property
    def per_host(self) -> int:
        return len(self.sets[0])

    def inside(self, axes: Sequence[str]) -> AxisGroup:
        """Return the ranks over these axes, which include data, whose index along data is on this host."""
        context, grid = self._context, self._context.grid
        on_this_host = self.sets[self._host_of[context.index("data")]]
        ranks = grid.group(context.rank, axes)
        indices = [index for index, rank in enumerate(ranks) if grid.index(rank, "data") in on_this_host]
        return context.subgroup(axes, indices, f"{'x'.join(axes)} inside of hosts")

    def between(self) -> AxisGroup:
        """Return the ranks at this rank's position on each host, itself among them."""
        index = self._context.index("data")
        position = self.sets[self._host_of[index]].index(index)
        return self._context.subgroup("data", [indices[position] for indices in self.sets], BETWEEN)
