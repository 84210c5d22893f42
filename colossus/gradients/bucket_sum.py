"""How the gradients of a bucket are summed over ranks: by one all-reduce, or inside of hosts and between them."""

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

#: what the bytes between hosts are counted under
BETWEEN = "data between hosts"


class BucketSum(Protocol):
    """Sums one bucket, once in each step."""

    def start(self, flat: Tensor) -> Pending:
        """Start to sum ``flat``, which may be overwritten: gradients, then a flag for each parameter."""


#: (parameters, axes, dtype) -> how the gradients of such a bucket are summed over these axes
SumFactory = Callable[[Sequence[nn.Parameter], tuple[str, ...], torch.dtype], BucketSum]


class FlatSum:
    """One all-reduce."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group

    def start(self, flat: Tensor) -> Pending:
        return collectives.all_reduce(flat, self._group, owned=True)


class TwoLevelSum:
    """Reduce-scatter over the ranks of a host, all-reduce between hosts, all-gather inside (TorchMPI's Cartesian
    communicators): over the network each rank sends its share of a bucket alone.

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
    """With zeros at the end, so that it divides."""
    missing = -flat.numel() % divisor
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


class Hosts:
    """The indices along data, in sets of those that are on one host: all sets of one size.

    Args:
        sets: of all indices; in each the order of positions.
    """

    def __init__(self, context: ParallelContext, sets: Sequence[Sequence[int]]) -> None:
        self._context, self.sets = context, [list(each) for each in sets]
        self._host_of = {index: number for number, each in enumerate(self.sets) for index in each}

    @classmethod
    def given(cls, context: ParallelContext, per_host: int) -> Hosts:
        """Neighbours along data."""
        size = context.size("data")
        return cls(context, [range(first, first + per_host) for first in range(0, size, per_host)])

    @classmethod
    def found(cls, context: ParallelContext, what: str = "parallel.strategy = 'hierarchical'") -> Hosts:
        """By the names of the ranks' hosts. Collective, over all ranks.

        Replicas of several ranks share a host where all their ranks do, each with its counterpart.

        Raises:
            ValueError: on all ranks, where hosts have different numbers of them.
        """
        names = all_gather_object(host_id(), context.group(context.grid.names))
        of_index: dict[int, list[str]] = {}
        for rank, name in enumerate(names):
            of_index.setdefault(context.grid.index(rank, "data"), []).append(name)
        sets: dict[tuple[str, ...], list[int]] = {}
        for index, each in sorted(of_index.items()):
            sets.setdefault(tuple(each), []).append(index)
        sizes = [len(each) for each in sets.values()]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{what} wants as many data ranks on each host, and found {', '.join(map(str, sizes))}: start as many "
                f"processes on each host, give hosts= or per_host=, or take 'all_reduce'"
            )
        return cls(context, list(sets.values()))

    def of(self, index: int) -> int:
        """The number of the host of an index along data."""
        return self._host_of[index]

    @property
    def are_levels(self) -> bool:
        """Whether there are several hosts, of several ranks each: else one level is all there is."""
        return len(self.sets) > 1 and self.per_host > 1

    @property
    def per_host(self) -> int:
        return len(self.sets[0])

    def inside(self, axes: Sequence[str]) -> AxisGroup:
        """The ranks over these axes, that of data among them, whose index along data is on this host."""
        context, grid = self._context, self._context.grid
        mine = self.sets[self._host_of[context.index("data")]]
        ranks = grid.group(context.rank, axes)
        indices = [at for at, rank in enumerate(ranks) if grid.index(rank, "data") in mine]
        return context.subgroup(axes, indices, f"{'x'.join(axes)} inside of hosts")

    def between(self) -> AxisGroup:
        """This rank's counterparts on all hosts, itself among them."""
        index = self._context.index("data")
        position = self.sets[self._host_of[index]].index(index)
        return self._context.subgroup("data", [each[position] for each in self.sets], BETWEEN)
