"""Values on their way from the servers to a rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colossus.data_parallel.servers.shards import ServerShard, SharedShards
from colossus.server.handles import Handle


class Pull:
    """Values of shards on their way to a rank.

    Args:
        values: where they come to: of the shards that this rank is the first of its replica to hold.
        waited: is told the seconds for which they were waited for.
    """

    def __init__(
        self,
        handle: Handle[None],
        shards: Sequence[ServerShard],
        values: Sequence[Tensor],
        shared: SharedShards,
        waited: Callable[[float], None],
    ) -> None:
        self._handle, self._shards, self._values = handle, shards, list(values)
        self._shared, self._waited = shared, waited

    def own(self) -> list[tuple[ServerShard, Tensor]]:
        """The shards with what this rank has pulled itself; not collective."""
        began = time.perf_counter()
        self._handle.wait()
        self._waited(time.perf_counter() - began)
        return list(zip(self._shards, self._values, strict=True))

    def wait(self) -> list[tuple[ServerShard, Tensor]]:
        """The shards with their values. Collective in a replica of several ranks."""
        found = self.own()
        if self._shared:
            self._shared.take_first(self._shards, self._values)
        return found

    @torch.no_grad()
    def wait_into_parameters(self) -> None:
        """The parameters of this rank are these values. Collective in a replica of several ranks."""
        for shard, value in self.wait():
            local = shard.local()
            if value.data_ptr() != local.data_ptr():
                local.copy_(value, non_blocking=True)  # nobody writes to it any more
