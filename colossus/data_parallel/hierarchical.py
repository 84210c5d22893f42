"""All-reduce in two levels: inside of each host, and between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from colossus.context.groups import AxisGroup
from colossus.data_parallel.all_reduce import AllReduce
from colossus.data_parallel.options.exact import HierarchicalOptions
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.bucket_sum import BucketSum, FlatSum, TwoLevelSum
from colossus.gradients.hosts import Hosts
from colossus.gradients.reduction import ModelParts


class Hierarchical(AllReduce):
    """Exact. Gradients are reduce-scattered over the ranks of a host, all-reduced between hosts, and all-gathered over
    the ranks of a host; else as all-reduce: in buckets, while backward runs.

    Hosts are given (``hosts`` or ``per_host``: neighbours along data share one), or found by what ranks know of the
    machines they are on. ``compress`` is of what goes between hosts.
    """

    def __init__(self, **options: Any) -> None:
        self.options = self._compress = HierarchicalOptions(**options)

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        context, per_host = parts.context, self.options.ranks_per_host(parts.context.size("data"))
        self.hosts = Hosts.found(context) if per_host is None else Hosts.given(context, per_host)
        super().setup(store, parts)

    def sum_of(self, params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
        if "data" not in axes or len(self.hosts.sets) == 1:
            return FlatSum(self.parts.context.group(axes))
        if self._feedback is not None or self.hosts.per_host == 1:
            return super().sum_of(params, axes, dtype)
        return TwoLevelSum(self.hosts.inside(axes), self.hosts.between())

    def hosts_of_rows(self) -> Hosts | None:
        return self.hosts if self.hosts.are_levels else None

    def levels(self, axes: tuple[str, ...]) -> tuple[AxisGroup, AxisGroup]:
        return self.hosts.inside(axes), self.hosts.between()
