"""Tables of which each rank holds and updates rows of its own: rows are fetched from the ranks that own them, and their
gradients summed there, in rounds of exchanges.
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
from colossus.sparse.table import TableSync

_Ids = TypeVar("_Ids", int, Tensor)


@dataclass(frozen=True)
class Placement:
    """Which rank stores which rows of a table: partitions of neighbouring rows, dealt to the owners in turn. With many
    of them owners send about as much as each other where ids are sorted by frequency, as words are.

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


class RowCache:
    """Rows of a table by id.

    Args:
        like: [.., dim]: rows are of its dtype, device and width.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like.new_empty((0, like.shape[1]))  # not the memory of the table itself
        self.clear()

    def clear(self) -> None:
        #: ascending, and of each the place of its row
        self._ids = self._places = torch.empty(0, dtype=torch.int64, device=self._like.device)
        self._rows = self._like

    def missing(self, ids: Tensor) -> Tensor:
        """Those of some distinct ids, ascending, that are not here."""
        if not len(self._ids) or not len(ids):
            return ids
        at = torch.searchsorted(self._ids, ids).clamp_(max=len(self._ids) - 1)
        return ids[self._ids[at] != ids]

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Keep rows whose ids are not here yet, in any order. ``rows`` may be kept as they are."""
        places = torch.arange(len(self._ids), len(self._ids) + len(ids), device=ids.device)
        self._ids, order = torch.cat((self._ids, ids)).sort()
        self._places = torch.cat((self._places, places))[order]
        self._rows = torch.cat((self._rows, rows)) if len(self._rows) else rows

    def rows_of(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, dim] of ids that are all here."""
        return self._rows[self._places[torch.searchsorted(self._ids, ids)]]


class Owners(TableSync):
    """Each row of a table is stored by its owner (`Placement`).

    A step fetches each row once: what one microbatch has fetched the next one finds, as does a recomputation, which
    exchanges nothing.

    Args:
        exchange: with the ranks that share the table, which are its owners.
    """

    def __init__(self, param: nn.Parameter, name: str, placement: Placement, exchange: RowExchange) -> None:
        super().__init__(param, placement.num_rows)
        self.name, self.placement, self._exchange = name, placement, exchange
        self._number = exchange.add(self)
        #: of each level the rows that have come through it; the first those of this rank
        self.caches = [RowCache(param.detach()) for _ in exchange.levels]

    def stored_rows(self, ids: Tensor) -> Tensor:
        """The rows of ids that this rank owns."""
        with as_shards():
            return self.param.detach().index_select(0, self.placement.place_of(ids))

    # -- a step -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.end()
        self._exchange.keeps = True

    def end(self) -> None:
        for cache in self.caches:
            cache.clear()
        self._exchange.keeps = False

    def fetch(self, ids: Tensor) -> Tensor:
        own = self.caches[0]
        if torch._C._current_graph_task_id() != -1:  # a recomputation: the other ranks may be elsewhere
            if len(own.missing(ids)):
                raise located_error(
                    f"{self.name!r}: a backward looks up rows that are not here any more. A recomputation (activation "
                    f"checkpointing) finds the rows of its forward in engine.train_step alone: in a backward of your "
                    f"own leave it out, or set parallel.strategy.ways = {{{self.name!r}: 'gather'}}"
                )
            return own.rows_of(ids)
        return self._exchange.fetch(self._number, ids)

    def read(self, ids: Tensor) -> Tensor:
        return self._exchange.fetch(self._number, ids, keep=False)

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
        towards: of each owner, by its index among all ranks that share a table, the index in ``group`` of the rank to
            which what is for it goes here.
    """

    group: AxisGroup
    towards: tuple[int, ...]


class Kind(IntEnum):
    """What a rank wants of a round: rows of a table, to keep or once; to give gradients; only to serve others."""

    FETCH = 0
    READ = 1
    SUM = 2
    END = 3


@dataclass(frozen=True)
class Request:
    """What a rank says at the start of a round, for itself or for its host.

    Attributes:
        table: number of the table; of END without meaning.
        rank: global, of who says it.
        is_used: of SUM, whether a backward has come to the table, on any rank for which the request is.
    """

    kind: Kind
    table: int
    rank: int
    is_used: bool = False

    @property
    def looks_up(self) -> bool:
        return self.kind in (Kind.FETCH, Kind.READ)


class RowExchange:
    """Over the levels from a rank to the owners of rows.

    A round begins with the lengths of what is sent, and with what each rank wants. So ranks that do not run the same
    program hear of it, and one that has nothing more to fetch serves the others until all are through (`serve`). A rank
    that raises leaves the others waiting in a round: they end by its exit.
    """

    def __init__(self, levels: Sequence[Level], rank: int, device: torch.device) -> None:
        self.levels, self._rank, self._device = levels, rank, device
        self._towards = [torch.tensor(level.towards, device=device) for level in levels]
        self._tables: list[Owners] = []
        #: whether rows that were fetched may be taken for those of a later lookup: inside of a step or an evaluation
        self.keeps = False

    def add(self, table: Owners) -> int:
        """The number of a table; all ranks add them in the same order."""
        self._tables.append(table)
        return len(self._tables) - 1

    # -- rounds -------------------------------------------------------------------------------------------

    def fetch(self, table: int, ids: Tensor, *, keep: bool = True) -> Tensor:
        """Rows [n, dim] of distinct ascending ids. Collective.

        Args:
            keep: take rows out of the caches, and leave them there.
        """
        _, rows = self._fetch(0, Request(Kind.FETCH if keep and self.keeps else Kind.READ, table, self._rank), ids)
        return rows

    def serve(self) -> None:
        """Give the others their rows until no rank wants more. Collective."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        while self._fetch(0, Request(Kind.END, 0, self._rank), nothing)[0].kind != Kind.END:
            pass

    def start_sum(self, table: int, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        """Start to sum gradients at the owners; what is returned waits for those of the rows that this rank owns.

        None where ``is_used`` is False on all ranks. Collective; of the last level only the start.
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
        """From a level on, for a rank that wants the rows of ids, or nothing: what all ranks said, and the rows."""
        level, is_last = self.levels[number], number == len(self.levels) - 1
        new, order, counts = ids, ids, [0] * level.group.size
        cache = self._tables[request.table].caches[number] if request.kind == Kind.FETCH else None
        if request.looks_up:
            new = ids if cache is None else cache.missing(ids)
            order, counts = self._by_target(number, self._tables[request.table], new)
        lengths, heard = self._agree(number, counts, request)
        moves = heard.looks_up
        wanted = uneven.all_to_all(new[order], lengths, level.group, "ids").wait() if moves else ids[:0]
        if is_last:
            said = heard
            found = self._tables[heard.table].stored_rows(wanted) if moves else None
        else:
            distinct, where = torch.unique(wanted, return_inverse=True)
            said, found = self._fetch(number + 1, heard, distinct)
            found = found[where]
        if not moves:
            return said, torch.empty(0, device=self._device)
        assert found is not None
        rows = uneven.all_to_all(found, lengths.back, level.group).wait()
        if not request.looks_up:
            return said, rows
        if cache is not None:
            cache.add(new[order], rows)
            return said, cache.rows_of(ids)
        back = torch.empty_like(rows)
        back[order] = rows
        return said, back

    def _agree(self, number: int, counts: Sequence[int], request: Request) -> tuple[uneven.Lengths, Request]:
        """Lengths of a round at one level, and what its ranks want.

        Raises:
            RuntimeError: they want different things.
        """
        said = request.kind, request.table, request.rank, request.is_used
        lengths, heard = uneven.agree(counts, self.levels[number].group, self._device, said)
        requests = [Request(Kind(kind), table, rank, bool(used)) for kind, table, rank, used in heard]
        acting = [each for each in requests if each.kind != Kind.END]
        if not acting:
            return lengths, requests[0]
        first = acting[0]
        # whoever gave its gradients waits for those of the others
        for other in requests if first.kind == Kind.SUM else acting:
            if (other.kind, other.table) != (first.kind, first.table):
                at, other_at = (f"the {each.kind.name} of {self._tables[each.table].name!r}" for each in (first, other))
                raise located_error(
                    f"rank {first.rank} is at {at} while rank {other.rank} is at {other_at}: rows of tables that have "
                    f"owners are exchanged by all ranks at once. Every rank must look up in the same tables as often "
                    f"and in the same order in each step, with an empty tensor of ids where it has none: look for an "
                    f"`if` in a forward that depends on the rank or on the data",
                    RuntimeError,
                )
        return lengths, replace(first, is_used=any(each.is_used for each in requests))

    # -- ids ----------------------------------------------------------------------------------------------

    def _by_target(self, number: int, table: Owners, ids: Tensor) -> tuple[Tensor, list[int]]:
        """What sorts ids by the rank of a level to which they go, and how many go to each."""
        towards = self._towards[number][table.placement.owner_of(ids)]
        counts = torch.bincount(towards, minlength=self.levels[number].group.size)
        return torch.argsort(towards, stable=True), counts.tolist()
