"""Tables whose rows are owned: each rank stores and updates some rows of a table.

In rounds of exchanges, ranks fetch rows from their owners, and owners sum the gradients of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor, nn

from colossus.comm import uneven
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.layout.split_parameter import as_shards
from colossus.rows.row_gradient import RowGradient
from colossus.sparse.row_cache import RowCache
from colossus.sparse.table import TableSync

_Ids = TypeVar("_Ids", int, Tensor)


@dataclass(frozen=True)
class Placement:
    """The rows that each owner of a table stores: partitions of consecutive rows go to the owners in turn.

    With many partitions, owners send about equally much also where ids are sorted by frequency, as words are.

    Attributes:
        num_rows: the rows of the whole table.
        num_owners: the number of owners.
        width: the rows of a partition; the last may have fewer.
    """

    num_rows: int
    num_owners: int
    width: int

    @classmethod
    def of(cls, num_rows: int, num_owners: int, num_partitions: int | None = None) -> Placement:
        """Return the placement with about ``num_partitions`` partitions; None: one for each owner."""
        return cls(num_rows, num_owners, -(-num_rows // max(num_owners, num_partitions or 0)))

    def owner_of(self, ids: _Ids) -> _Ids:
        return ids // self.width % self.num_owners

    def place_of(self, ids: _Ids) -> _Ids:
        """Return the index of a row among the rows of its owner."""
        return ids // (self.width * self.num_owners) * self.width + ids % self.width

    def intervals(self, owner: int) -> list[tuple[int, int]]:
        """Return the rows that an owner stores, in order, as (start, stop) of each partition."""
        starts = range(owner * self.width, self.num_rows, self.num_owners * self.width)
        return [(start, min(start + self.width, self.num_rows)) for start in starts]


class Owners(TableSync):
    """A table each of whose rows is stored by its owner (`Placement`).

    A step fetches each row once: later microbatches and recomputations take it from a cache. A recomputation exchanges
    nothing.

    Args:
        param: this rank's rows.
        name: the full name of the table.
        placement: the rows of each owner.
        exchange: the exchange with the ranks that share the table, which are its owners.
    """

    def __init__(self, param: nn.Parameter, name: str, placement: Placement, exchange: RowExchange) -> None:
        super().__init__(param, placement.num_rows)
        self.name, self.placement, self._exchange = name, placement, exchange
        self._number = exchange.add(self)
        #: for each level, the rows that came through it; the first cache is that of this rank's lookups
        self.caches = [RowCache(param.detach()) for _ in exchange.levels]

    def stored_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids that this rank owns."""
        with as_shards():
            return self.param.detach().index_select(0, self.placement.place_of(ids))

    # -- a step -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.end()
        self._exchange.uses_caches = True

    def end(self) -> None:
        for cache in self.caches:
            cache.clear()
        self._exchange.uses_caches = False

    def fetch(self, ids: Tensor) -> Tensor:
        own = self.caches[0]
        if torch._C._current_graph_task_id() != -1:  # a recomputation, in which other ranks may not take part
            if len(own.missing(ids)):
                raise located_error(
                    f"{self.name!r}: a backward looks up rows that are not on this rank any more. Only "
                    f"engine.train_step keeps the rows of a forward for its recomputation (activation checkpointing): "
                    f"in a backward of your own do not recompute, or set "
                    f"parallel.strategy.ways = {{{self.name!r}: 'gather'}}"
                )
            return own.rows_of(ids)
        return self._exchange.fetch(self._number, ids)

    def read(self, ids: Tensor) -> Tensor:
        return self._exchange.fetch(self._number, ids, use_cache=False)

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        wait = self._exchange.start_sum(self._number, gradient, is_used=is_used)

        def finish() -> RowGradient | None:
            total = wait()
            return None if total is None else RowGradient(self.placement.place_of(total.ids), total.rows)

        return finish


# -- the exchange ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One exchange on the way from a rank to the owners of rows.

    Attributes:
        group: the ranks that exchange.
        towards: the next rank on the way to each owner: an index in ``group``, by the owner's index among all ranks
            that share a table.
    """

    group: AxisGroup
    towards: tuple[int, ...]


class Kind(IntEnum):
    """The kind of a rank's request: rows that are cached, rows that are not, a sum of gradients, or nothing more."""

    FETCH = 0
    READ = 1
    SUM = 2
    END = 3


@dataclass(frozen=True)
class Request:
    """A rank's request at the start of a round, for itself or for its host.

    Attributes:
        kind: the kind of the request.
        table: the number of the table; END ignores it.
        rank: the global rank.
        is_used: for SUM, whether a backward has come to the table on a rank of the request.
    """

    kind: Kind
    table: int
    rank: int
    is_used: bool = False

    @property
    def looks_up(self) -> bool:
        return self.kind in (Kind.FETCH, Kind.READ)


class RowExchange:
    """The exchange of rows and gradients between the ranks that share tables, over the levels to the owners.

    In a round, ranks first exchange their requests and the lengths of what they send. So ranks that do not run the same
    program get an error. A rank that has nothing more to fetch answers the others until all are through (`drain`). When
    a rank raises, the others wait in a round until they end by its exit.

    Attributes:
        levels: the levels.
        uses_caches: whether a lookup may use rows that an earlier one fetched, as it may in a step or an evaluation.
    """

    def __init__(self, levels: Sequence[Level], rank: int, device: torch.device) -> None:
        self.levels, self._rank, self._device = levels, rank, device
        self._towards = [torch.tensor(level.towards, device=device) for level in levels]
        self._tables: list[Owners] = []
        self.uses_caches = False

    def add(self, table: Owners) -> int:
        """Add a table, and return its number; all ranks add them in the same order."""
        self._tables.append(table)
        return len(self._tables) - 1

    # -- rounds -------------------------------------------------------------------------------------------

    def fetch(self, table: int, ids: Tensor, *, use_cache: bool = True) -> Tensor:
        """Return the rows [n, dim] of distinct ascending ids. Collective.

        Args:
            table: the number of the table.
            ids: ids of the whole table.
            use_cache: take rows from the caches, and add new ones to them.
        """
        kind = Kind.FETCH if use_cache and self.uses_caches else Kind.READ
        return self._fetch(0, Request(kind, table, self._rank), ids)[1]

    def drain(self) -> None:
        """Answer the fetches of other ranks until no rank has more. Collective."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        while self._fetch(0, Request(Kind.END, 0, self._rank), nothing)[0].kind != Kind.END:
            pass

    def start_sum(self, table: int, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        """Start to sum gradients at the owners. Collective; the exchange of the last level is only started.

        Returns:
            A function that waits for the sum of the rows that this rank owns, and returns it; None where ``is_used``
            is False on all ranks.
        """
        request, parts = Request(Kind.SUM, table, self._rank, is_used), [gradient]
        for number, level in enumerate(self.levels):
            gradient = RowGradient.added(parts)
            order, counts = self._by_target(number, self._tables[table], gradient.ids)
            lengths, request = self._agree(number, counts, request)
            ids = uneven.all_to_all(gradient.ids[order], lengths, level.group, "ids")
            rows = uneven.all_to_all(gradient.rows[order], lengths, level.group, "rows")
            if number < len(self.levels) - 1:
                parts = RowGradient.parts(ids.wait(), rows.wait(), lengths.received)

        def finish() -> RowGradient | None:
            total = RowGradient.added(RowGradient.parts(ids.wait(), rows.wait(), lengths.received))
            return total if request.is_used else None

        return finish

    def _fetch(self, number: int, request: Request, ids: Tensor) -> tuple[Request, Tensor]:
        """Run a round from a level on; return the request of the last level's ranks, and the rows of ``ids``, if any.

        Args:
            number: the number of the level.
            request: this rank's request.
            ids: the ids of its rows; none for SUM and END.
        """
        level, is_last = self.levels[number], number == len(self.levels) - 1
        new, order, counts = ids, ids, [0] * level.group.size
        cache = self._tables[request.table].caches[number] if request.kind == Kind.FETCH else None
        if request.looks_up:
            new = ids if cache is None else cache.missing(ids)
            order, counts = self._by_target(number, self._tables[request.table], new)
        lengths, group_request = self._agree(number, counts, request)
        moves = group_request.looks_up
        wanted = uneven.all_to_all(new[order], lengths, level.group, "ids").wait() if moves else ids[:0]
        if is_last:
            last_request = group_request
            answer = self._tables[group_request.table].stored_rows(wanted) if moves else None
        else:
            distinct, where = torch.unique(wanted, return_inverse=True)
            last_request, answer = self._fetch(number + 1, group_request, distinct)
            answer = answer[where]
        if not moves:
            return last_request, torch.empty(0, device=self._device)
        assert answer is not None
        rows = uneven.all_to_all(answer, lengths.back, level.group).wait()
        if not request.looks_up:
            return last_request, rows
        if cache is not None:
            cache.add(new[order], rows)
            return last_request, cache.rows_of(ids)
        in_order = torch.empty_like(rows)
        in_order[order] = rows
        return last_request, in_order

    def _agree(self, number: int, counts: Sequence[int], request: Request) -> tuple[uneven.Lengths, Request]:
        """Exchange the lengths of a round at one level, and return them and the common request of its ranks.

        Raises:
            RuntimeError: the ranks have different requests.
        """
        words = request.kind, request.table, request.rank, request.is_used
        lengths, all_words = uneven.agree(counts, self.levels[number].group, self._device, words)
        requests = [Request(Kind(kind), table, rank, bool(used)) for kind, table, rank, used in all_words]
        active = [other for other in requests if other.kind != Kind.END]
        if not active:
            return lengths, requests[0]
        first = active[0]
        # a rank that sums gradients needs those of all others
        for other in requests if first.kind == Kind.SUM else active:
            if (other.kind, other.table) != (first.kind, first.table):
                call, other_call = (
                    f"the {peer.kind.name} of {self._tables[peer.table].name!r}" for peer in (first, other)
                )
                raise located_error(
                    f"rank {first.rank} is at {call} while rank {other.rank} is at {other_call}: rows of tables "
                    f"that have owners are exchanged by all ranks at once. Every rank must look up in the same tables "
                    f"as often and in the same order in each step, with an empty tensor of ids where it has none: look "
                    f"for an `if` in a forward that depends on the rank or on the data",
                    RuntimeError,
                )
        return lengths, replace(first, is_used=any(peer.is_used for peer in requests))

    # -- ids ----------------------------------------------------------------------------------------------

    def _by_target(self, number: int, table: Owners, ids: Tensor) -> tuple[Tensor, list[int]]:
        """Return the order that sorts ids by the rank of a level to which they go, and how many go to each rank."""
        towards = self._towards[number][table.placement.owner_of(ids)]
        counts = torch.bincount(towards, minlength=self.levels[number].group.size)
        return torch.argsort(towards, stable=True), counts.tolist()
