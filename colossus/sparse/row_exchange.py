"""Rows of owned tables between the ranks that share them: fetched, and their gradients summed, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from colossus.comm import uneven
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.rows.row_gradient import RowGradient


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
        self._ids = torch.empty(0, dtype=torch.int64, device=self._like.device)
        self._places = self._ids
        self._rows = self._like
        self._used = 0

    def missing(self, ids: Tensor) -> Tensor:
        """Those of some distinct ids, ascending, that are not here."""
        if not len(self._ids) or not len(ids):
            return ids
        at = torch.searchsorted(self._ids, ids).clamp_(max=len(self._ids) - 1)
        return ids[self._ids[at] != ids]

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Keep rows whose ids are not here yet, in any order. ``rows`` may be kept as they are."""
        if not len(ids):
            return
        if not self._used:
            self._ids, self._places = ids.sort()
            self._rows, self._used = rows, len(ids)
            return
        places = torch.arange(self._used, self._used + len(ids), device=ids.device)
        if self._used + len(ids) > len(self._rows):  # twice as many, so that each row is copied twice at most
            grown = rows.new_empty((2 * (self._used + len(ids)), rows.shape[1]))
            grown[: self._used] = self._rows[: self._used]
            self._rows = grown
        self._rows[self._used : self._used + len(ids)] = rows
        self._used += len(ids)
        self._ids, order = torch.cat((self._ids, ids)).sort()
        self._places = torch.cat((self._places, places))[order]

    def rows_of(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, dim] of ids that are all here."""
        return self._rows[self._places[torch.searchsorted(self._ids, ids)]]


class Kind(IntEnum):
    """What a rank wants of a round."""

    #: rows of a table
    FETCH = 0
    #: the same of rows that are not wanted again
    READ = 1
    #: to give the gradients of its rows of a table
    SUM = 2
    #: nothing more: it serves the others
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


class OwnedRows(Protocol):
    """One of the tables whose rows are exchanged."""

    name: str
    #: of each level the rows that have come through it; the first those of this rank
    caches: list[RowCache]

    def owners_of(self, ids: Tensor) -> Tensor:
        """Of each id the index of its owner."""
        ...

    def stored_rows(self, ids: Tensor) -> Tensor:
        """The rows of ids that this rank owns."""
        ...


class RowExchange:
    """Over the levels from a rank to the owners of rows.

    A round begins with the lengths of what is sent, and with what each rank wants. So ranks that do not run the same
    program hear of it, and one that has nothing more to fetch serves the others until all are through (`serve`). A rank
    that raises leaves the others waiting in a round: they end by its exit.
    """

    def __init__(self, levels: Sequence[Level], rank: int, device: torch.device) -> None:
        self.levels, self._rank, self._device = levels, rank, device
        self._towards = [torch.tensor(level.towards, device=device) for level in levels]
        self._tables: list[OwnedRows] = []
        #: whether rows that were fetched may be taken for those of a later lookup: inside of a step or an evaluation
        self.keeps = False

    def add(self, table: OwnedRows) -> int:
        """The number of a table; all ranks add them in the same order."""
        self._tables.append(table)
        return len(self._tables) - 1

    # -- rounds -------------------------------------------------------------------------------------------

    def fetch(self, table: int, ids: Tensor, *, keep: bool = True) -> Tensor:
        """Rows [n, dim] of distinct ascending ids. Collective.

        Args:
            keep: take rows out of the caches, and leave them there.
        """
        _, rows = self._fetch(0, self._say(Kind.FETCH if keep and self.keeps else Kind.READ, table), ids)
        return rows

    def serve(self) -> None:
        """Give the others their rows until no rank wants more. Collective."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        while self._fetch(0, self._say(Kind.END, 0), nothing)[0].kind != Kind.END:
            pass

    def start_sum(self, table: int, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        """Start to sum gradients at the owners; what is returned waits for those of the rows that this rank owns.

        None where ``is_used`` is False on all ranks. Collective; of the last level only the start.
        """
        request, parts = self._say(Kind.SUM, table, is_used), [gradient]
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

    # -- what ranks say -----------------------------------------------------------------------------------

    def _say(self, kind: Kind, table: int, is_used: bool = False) -> Request:
        return Request(kind, table, self._rank, is_used)

    def _agree(self, number: int, counts: Sequence[int], request: Request) -> tuple[uneven.Lengths, Request]:
        """Lengths of a round at one level, and what its ranks want together."""
        group = self.levels[number].group
        said = request.kind, request.table, request.rank, request.is_used
        lengths, heard = uneven.agree(counts, group, self._device, said)
        return lengths, self._together([Request(Kind(kind), of, by, bool(used)) for kind, of, by, used in heard])

    def _together(self, requests: Sequence[Request]) -> Request:
        """What ranks want together.

        Raises:
            RuntimeError: they want different things.
        """
        acting = [request for request in requests if request.kind != Kind.END]
        if not acting:
            return requests[0]
        first = acting[0]
        # whoever gave its gradients waits for those of the others
        compared = requests if first.kind == Kind.SUM else acting
        for other in compared:
            if (other.kind, other.table) != (first.kind, first.table):
                raise located_error(
                    f"rank {first.rank} {self._doing(first)} while rank {other.rank} {self._doing(other)}: rows of "
                    f"tables that have owners are exchanged by all ranks together. Every rank must look up in the same "
                    f"tables as often and in the same order in each step, with an empty tensor of ids where it has "
                    f"none: look for an `if` in a forward that depends on the rank or on the data",
                    RuntimeError,
                )
        return replace(first, is_used=any(request.is_used for request in requests))

    def _doing(self, request: Request) -> str:
        if request.kind == Kind.END:
            return "is through with its lookups"
        name = self._tables[request.table].name
        return f"looks up in {name!r}" if request.looks_up else f"sums the gradient of {name!r}"

    # -- ids ----------------------------------------------------------------------------------------------

    def _by_target(self, number: int, table: OwnedRows, ids: Tensor) -> tuple[Tensor, list[int]]:
        """What sorts ids by the rank of a level to which they go, and how many go to each."""
        towards = self._towards[number][table.owners_of(ids)]
        counts = torch.bincount(towards, minlength=self.levels[number].group.size)
        return torch.argsort(towards, stable=True), counts.tolist()
