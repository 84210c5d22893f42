"""How the gradients of a bucket are summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.pending import Pending, Staged, Stages
from colossus.context.groups import AxisGroup


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
