"""Each rank holds and updates rows of its own, and looks up those of others by an exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from colossus.error_place import located_error
from colossus.layout.split_parameter import as_shards
from colossus.rows.row_gradient import RowGradient
from colossus.sparse.row_exchange import RowCache, RowExchange
from colossus.sparse.ways import TableSync

_Ids = TypeVar("_Ids", int, Tensor)


@dataclass(frozen=True)
class Placement:
    """Which rank stores which rows of a table: it is cut into partitions of neighbouring rows, which its owners are
    dealt in turn.

    With many partitions owners send about as much as each other where ids are sorted by frequency, as words are.

    Attributes:
        width: rows of a partition; the last may have fewer.
    """

    num_rows: int
    num_owners: int
    width: int

    @classmethod
    def of(cls, num_rows: int, num_owners: int, num_partitions: int | None = None) -> Placement:
        """Of about so many partitions; None: one for each owner."""
        return cls(num_rows, num_owners, -(-num_rows // max(num_owners, num_partitions or 0)))

    def owner_of(self, ids: _Ids) -> _Ids:
        return ids // self.width % self.num_owners

    def place_of(self, ids: _Ids) -> _Ids:
        """Where among the rows of its owner a row is stored."""
        return ids // (self.width * self.num_owners) * self.width + ids % self.width

    def intervals(self, owner: int) -> list[tuple[int, int]]:
        """The rows that an owner stores, in order: (start, stop) of each partition."""
        starts = range(owner * self.width, self.num_rows, self.num_owners * self.width)
        return [(start, min(start + self.width, self.num_rows)) for start in starts]


class Owners(TableSync):
    """Each row of a table is stored by its owner (`Placement`).

    A step fetches each row once: what one microbatch has fetched the next one finds, as does a recomputation, which
    exchanges nothing.

    Args:
        exchange: with the ranks that share the table, which are its owners.
    """

    def __init__(self, param: nn.Parameter, name: str, placement: Placement, exchange: RowExchange) -> None:
        super().__init__(param, placement.num_rows)
        self.name, self._placement, self._exchange = name, placement, exchange
        self._number = exchange.add(self)
        self.caches = [RowCache(param.detach()) for _ in exchange.levels]

    # -- what `RowExchange` asks --------------------------------------------------------------------------

    def owners_of(self, ids: Tensor) -> Tensor:
        return self._placement.owner_of(ids)

    def stored_rows(self, ids: Tensor) -> Tensor:
        with as_shards():
            return self.param.detach().index_select(0, self._placement.place_of(ids))

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

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        wait = self._exchange.start_sum(self._number, gradient, is_used=is_used)

        def finish() -> RowGradient | None:
            total = wait()
            return None if total is None else RowGradient(self._placement.place_of(total.ids), total.rows)

        return finish
