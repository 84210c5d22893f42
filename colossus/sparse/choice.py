"""Which way the gradient of each table takes, and what is refused. No torch.

A table is owned by the ranks that share it, unless something speaks against that: by `bytes_sent`, for any number of
ranks and any part of the rows that a step touches, owners send at most what gathering and all-reducing send, and they
hold the table once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from colossus.comm.accounting import sent

WayName = Literal["dense", "gather", "owners"]
WAYS: tuple[WayName, ...] = ("owners", "gather", "dense")

#: a table of at most so many bytes on a rank is dense: its all-reduce is one short message, and rows take several
SMALL_BYTES = 32 * 1024


@dataclass(frozen=True)
class TableFacts:
    """A table (``sparse=True``) as a plan has it.

    Attributes:
        name: full name of the parameter.
        shape: of the whole table: rows, dim.
        held: what a rank computes with: rows, dim of its features.
        itemsize: bytes of an element.
        ranks: among which it is shared: those that look up other ids.
        tied: what else computes with the parameter, all of its rows at once; None where nothing does.
    """

    name: str
    shape: tuple[int, ...]
    held: tuple[int, ...]
    itemsize: int
    ranks: int
    tied: str | None = None

    @property
    def size(self) -> int:
        """Bytes of ``held``."""
        return math.prod(self.held) * self.itemsize

    @property
    def can_be_owned(self) -> bool:
        """Whether each rank can have rows of its own."""
        return self.tied is None and self.held[0] >= self.ranks


@dataclass(frozen=True)
class Survey:
    """The tables of a whole model."""

    tables: tuple[TableFacts, ...] = ()

    @property
    def untied(self) -> list[TableFacts]:
        return [table for table in self.tables if table.tied is None]


@dataclass(frozen=True)
class Choice:
    """Of one table.

    Attributes:
        why: in a few words.
    """

    table: TableFacts
    way: WayName
    why: str

    @property
    def in_words(self) -> str:
        """``table embedding.weight 100000 x 256: owners (each of 4 ranks holds its rows)``"""
        return f"table {self.table.name} {' x '.join(map(str, self.table.shape))}: {self.way} ({self.why})"


def choose(table: TableFacts, pinned: WayName | None = None) -> Choice:
    """The way of a table.

    Args:
        pinned: what the user has said.
    """
    if table.tied is not None:
        return Choice(table, "dense", f"tied to {table.tied}, which touches every row")
    if pinned is not None:
        return Choice(table, pinned, "as parallel.strategy.ways says")
    if table.ranks == 1:
        return Choice(table, "dense", "one rank, which sends nothing")
    if table.size <= SMALL_BYTES:
        return Choice(table, "dense", f"at most {SMALL_BYTES // 1024} KiB: one short message")
    if not table.can_be_owned:
        return Choice(table, "dense", f"{table.held[0]} rows, fewer than the {table.ranks} ranks that would own them")
    return Choice(table, "owners", f"each of {table.ranks} ranks holds its rows")


def bytes_sent(way: WayName, parties: int, size: float, alpha: float) -> float:
    """What one of N = ``parties`` sends in a step, of rows alone (their ids are apart). Source: Parallax (1808.02621).

    A party is a rank; where rows are added up inside of hosts before they leave them, a host.

    Dense all-reduce 2 w (N - 1) / N; gather of rows alpha w (N - 1); owners 2 alpha w (N - 1) / N: rows to who looks
    them up, and their gradients back, the most of it elsewhere.

    Args:
        size: w, bytes of the table as one rank computes with it (of a table split by features, the rank's features).
        alpha: the part of its rows that a party touches in a step.
    """
    if way == "dense":
        return sent("all_reduce", parties, size)
    if way == "gather":
        return sent("all_gather", parties, alpha * size)
    return 2 * sent("all_to_all", parties, alpha * size)


# -- what the user has said -------------------------------------------------------------------------------------


def first_fit(patterns: Mapping[str, object], name: str) -> str | None:
    """The first pattern that fits the name of a table."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def way_problems(ways: Mapping[str, WayName], survey: Survey) -> list[str]:
    """One line for each pattern that fits no table, and each way that a table has been given and cannot take."""
    names = [table.name for table in survey.tables]
    problems = [
        f"parallel.strategy.ways: {pattern!r} fits no table with sparse=True; "
        f"the tables are {', '.join(map(repr, names)) or 'none: layers.Embedding(.., sparse=True) is one'}"
        for pattern in ways
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    for table in survey.tables:
        pattern = first_fit(ways, table.name)
        if pattern is None:
            continue
        what = f"parallel.strategy.ways: {pattern!r} = {ways[pattern]!r}, but table {table.name!r}"
        if table.tied is not None and ways[pattern] != "dense":
            problems.append(
                f"{what} is tied to {table.tied}, whose gradient is of every row: it is dense. Leave it out, or untie "
                f"the two (a head with a sampled softmax touches few rows)"
            )
        elif ways[pattern] == "owners" and not table.can_be_owned:
            problems.append(
                f"{what} has {table.held[0]} rows, fewer than the {table.ranks} ranks that would own them: use "
                f"'gather' or 'dense'"
            )
    return problems
