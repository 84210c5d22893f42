"""Each rank holds and updates rows of its own, and looks up those of others by an exchange."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossus.error_place import located_error
from colossus.layout.split_parameter import as_shards
from colossus.rows.row_gradient import RowGradient
from colossus.sparse.placement import Placement, bins_for
from colossus.sparse.row_cache import RowCache
from colossus.sparse.row_exchange import RowExchange
from colossus.sparse.ways.table_sync import TableSync


class Owners(TableSync):
    """Each partition of a table is stored by its owner (`Placement`).

    A step fetches each row once: what one microbatch has fetched the next one finds, as does a recomputation, which
    exchanges nothing.

    Args:
        exchange: with the ranks that share the table, which are its owners.
    """

    def __init__(self, param: nn.Parameter, name: str, placement: Placement, exchange: RowExchange) -> None:
        super().__init__(param, placement.num_rows)
        self.name, self._exchange = name, exchange
        self._number = exchange.add(self)
        self.caches = [RowCache(param.detach()) for _ in exchange.levels]
        #: whether rows are counted that ranks send here, in equal bins of the table
        self.counts = False
        self.touched = torch.zeros(bins_for(self.num_rows), dtype=torch.int64, device=param.device)
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Rows are where a placement says from now on."""
        device = self.param.device
        self.placement = placement
        self._bounds = torch.tensor(placement.bounds[1:], device=device)
        self._owners = torch.tensor(placement.owners, device=device)
        #: of each partition, what its owner subtracts from an id
        starts = torch.tensor(placement.bounds[:-1], device=device)
        self._shifts = starts - torch.tensor(placement.offsets, device=device)

    # -- what `RowExchange` asks --------------------------------------------------------------------------

    def count(self, ids: Tensor) -> None:
        if self.counts:
            bins = ((ids + 1) * len(self.touched) - 1) // self.num_rows
            self.touched += torch.bincount(bins, minlength=len(self.touched))

    def owners_of(self, ids: Tensor) -> Tensor:
        return self._owners[self._partitions(ids)]

    def stored_rows(self, ids: Tensor) -> Tensor:
        with as_shards():
            return self.param.detach().index_select(0, self._stored(ids))

    def _partitions(self, ids: Tensor) -> Tensor:
        return torch.searchsorted(self._bounds, ids, right=True)

    def _stored(self, ids: Tensor) -> Tensor:
        """The places of ids of this owner among the rows that it stores."""
        return ids - self._shifts[self._partitions(ids)]

    # -- a step -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._forget()
        self._exchange.keeps = True

    def end(self) -> None:
        self._forget()
        self._exchange.keeps = False

    def _forget(self) -> None:
        for cache in self.caches:
            cache.clear()

    def fetch(self, ids: Tensor) -> Tensor:
        own = self.caches[0]
        if torch._C._current_graph_task_id() != -1:  # a recomputation: the other ranks may be elsewhere
            if len(own.missing(ids)):
                raise located_error(
                    f"{self.name!r}: a backward looks up rows that are not here any more. Under activation "
                    f"checkpointing the recomputation must look up what the forward did; and it finds rows in "
                    f"engine.train_step alone: in a backward of your own leave activation checkpointing out, or hold "
                    f"the table whole on each rank, parallel.strategy.ways = {{{self.name!r}: 'gather'}}"
                )
            return own.rows_of(ids)
        return self._exchange.fetch(self._number, ids)

    def read(self, ids: Tensor) -> Tensor:
        return self._exchange.fetch(self._number, ids, keep=False)

    def fail(self) -> None:
        self._exchange.fail(self._number)

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        wait = self._exchange.start_sum(self._number, gradient, is_used=is_used)

        def finish() -> RowGradient | None:
            total = wait()
            return None if total is None else RowGradient(self._stored(total.ids), total.rows)

        return finish
