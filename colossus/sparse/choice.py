"""The choice of the way in which the gradient of each table is summed. No torch.

By default the ranks that share a table own its rows. By `bytes_sent`, for any number of ranks and any fraction of
touched rows, owners send no more bytes than an all-gather or an all-reduce, and they store the table once.
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

#: a table of at most this many bytes on a rank is dense: its all-reduce is one short message, and rows take several
SMALL_BYTES = 32 * 1024


@dataclass(frozen=True)
class TableFacts:
    """A table (``sparse=True``) under a plan.

    Attributes:
        name: the full name of the parameter.
        shape: the shape of the whole table: rows, dim.
        local_shape: the shape with which a rank computes: rows, dim of its features.
        itemsize: the bytes of an element.
        ranks: the number of ranks that share the table and look up different ids.
        tied: the module that also computes with all rows of the parameter at once; None where there is none.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    itemsize: int
    ranks: int
    tied: str | None = None

    @property
    def size(self) -> int:
        """The bytes of the table with which a rank computes."""
        return math.prod(self.local_shape) * self.itemsize

    @property
    def can_be_owned(self) -> bool:
        """Return whether each rank can own rows of the table."""
        return self.tied is None and self.local_shape[0] >= self.ranks


@dataclass(frozen=True)
class Survey:
    """The tables of a whole model."""

    tables: tuple[TableFacts, ...] = ()

    @property
    def untied(self) -> list[TableFacts]:
        return [table for table in self.tables if table.tied is None]


@dataclass(frozen=True)
class Choice:
    """The way of one table.

    Attributes:
        table: the table.
        way: its way.
        why: the reason, in a few words.
    """

    table: TableFacts
    way: WayName
    why: str

    @property
    def in_words(self) -> str:
        """A line of text: ``table embedding.weight 100000 x 256: owners (each of 4 ranks holds its rows)``."""
        return f"table {self.table.name} {' x '.join(map(str, self.table.shape))}: {self.way} ({self.why})"


def choose(table: TableFacts, pinned: WayName | None = None) -> Choice:
    """Choose the way of a table.

    Args:
        table: the table.
        pinned: the way that the config names, if any.
    """
    if table.tied is not None:
        return Choice(table, "dense", f"tied to {table.tied}, which uses every row")
    if pinned is not None:
        return Choice(table, pinned, "as parallel.strategy.ways says")
    if table.ranks == 1:
        return Choice(table, "dense", "one rank, which sends nothing")
    if table.size <= SMALL_BYTES:
        return Choice(table, "dense", f"at most {SMALL_BYTES // 1024} KiB: one short message")
    if not table.can_be_owned:
        reason = f"{table.local_shape[0]} rows, fewer than the {table.ranks} ranks that would own them"
        return Choice(table, "dense", reason)
    return Choice(table, "owners", f"each of {table.ranks} ranks holds its rows")


def bytes_sent(way: WayName, parties: int, size: float, alpha: float) -> float:
    """Return the bytes of rows that one of N = ``parties`` sends in a step; ids are not counted (Parallax, 1808.02621).

    A party is a rank, or a host where rows are summed inside hosts before they leave them.

    A dense all-reduce sends 2 w (N - 1) / N, a gather of rows alpha w (N - 1). Owners send 2 alpha w (N - 1) / N: a row
    to the rank that looks it up, and its gradient back.

    Args:
        way: the way of the table.
        parties: the number of ranks, or of hosts.
        size: w, the bytes of the table with which one rank computes (those of its features, where they are split).
        alpha: the fraction of the rows that a party touches in a step.
    """
    if way == "dense":
        return sent("all_reduce", parties, size)
    if way == "gather":
        return sent("all_gather", parties, alpha * size)
    return 2 * sent("all_to_all", parties, alpha * size)


# -- the ways that a config names ---------------------------------------------------------------------------------


def first_fit(patterns: Mapping[str, object], name: str) -> str | None:
    """Return the first pattern that fits the name of a table, or None."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def way_problems(ways: Mapping[str, WayName], survey: Survey) -> list[str]:
    """Return one line for each pattern that fits no table, and for each way that its table cannot take."""
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
                f"{what} is tied to {table.tied}, whose gradient is of every row, so it is dense. Leave the pattern "
                f"out, or untie the two (a head with a sampled softmax touches few rows)"
            )
        elif ways[pattern] == "owners" and not table.can_be_owned:
            problems.append(
                f"{what} has {table.local_shape[0]} rows, fewer than the {table.ranks} ranks that would own them: use "
                f"'gather' or 'dense'"
            )
    return problems
