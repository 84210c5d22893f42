"""Which way the gradient of each table takes: the one that sends the fewest bytes. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from colossus.engine.sparse.cost import WAYS, WayName, bytes_sent
from colossus.registry import nearest

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
        per_data: how many of them share the samples of one data rank.
        tied: what else computes with the parameter, all of its rows at once; None where nothing does.
    """

    name: str
    shape: tuple[int, ...]
    held: tuple[int, ...]
    itemsize: int
    ranks: int
    per_data: int = 1
    tied: str | None = None

    @property
    def size(self) -> int:
        """Bytes of ``held``."""
        return math.prod(self.held) * self.itemsize


@dataclass(frozen=True)
class Survey:
    """The tables of a whole model.

    Attributes:
        others: names of its other parameters.
    """

    tables: tuple[TableFacts, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def untied(self) -> list[TableFacts]:
        return [table for table in self.tables if table.tied is None]


@dataclass(frozen=True)
class Alpha:
    """The part of a table's rows that is touched in a step.

    Attributes:
        rank: by one rank, all its microbatches together.
        host: by the ranks of a host together.
        source: given in the config; measured on batches; an upper bound from the number of integers in a batch; or
            unknown, which is the bound 1.
    """

    rank: float
    host: float
    source: Literal["given", "measured", "bound", "unknown"]

    @property
    def is_bound(self) -> bool:
        return self.source in ("bound", "unknown")

    @property
    def in_words(self) -> str:
        """``0.01 (measured)``, ``at most 0.3``, ``unknown``"""
        if self.source == "unknown":
            return "unknown"
        return f"at most {self.rank:.3g}" if self.is_bound else f"{self.rank:.3g} ({self.source})"


@dataclass(frozen=True)
class Parties:
    """Who sends: ranks, or, where rows are added up inside of hosts, hosts.

    Attributes:
        hosts: how many share the tables.
        aggregate: whether they add up first.
    """

    hosts: int = 1
    aggregate: bool = False

    @property
    def are_hosts(self) -> bool:
        return self.aggregate and self.hosts > 1


@dataclass(frozen=True)
class Choice:
    """Of one table.

    Attributes:
        way: taken.
        why: in a few words.
        sent: way -> bytes that a party sends in a step; ways that the table cannot take are not there.
        is_pinned: whether the user has said so.
    """

    table: TableFacts
    alpha: Alpha
    way: WayName
    why: str
    sent: Mapping[WayName, float]
    is_pinned: bool = False

    @property
    def in_words(self) -> str:
        """``table embedding.weight 100000 x 256: owners (the fewest bytes), alpha 0.01 measured``"""
        shape = " x ".join(map(str, self.table.shape))
        return f"table {self.table.name} {shape}: {self.way} ({self.why}), alpha {self.alpha.in_words}"


def costs(table: TableFacts, alpha: Alpha, parties: Parties) -> dict[WayName, float]:
    """Bytes that a party sends in a step, for each way that the table can take."""
    if table.tied is not None:
        possible: Iterable[WayName] = ("dense",)
    else:
        possible = (way for way in WAYS if way != "owners" or table.held[0] >= table.ranks)
    number, touched = (parties.hosts, alpha.host) if parties.are_hosts else (table.ranks, alpha.rank)
    return {way: bytes_sent(way, number, table.size, touched) for way in possible}


def choose(table: TableFacts, alpha: Alpha, parties: Parties, pinned: WayName | None = None) -> Choice:
    """The way with the fewest bytes.

    Of equal ones owners come before gather, since a table is held once then, and dense before both, since it is one
    collective; but owners before dense where alpha is an upper bound, since they send less as soon as it is smaller.
    """
    sent = costs(table, alpha, parties)
    if table.tied is not None:
        return Choice(table, alpha, "dense", f"tied to {table.tied}, which touches every row", sent)
    if pinned is not None:
        return Choice(table, alpha, pinned, "as parallel.strategy.ways says", sent, is_pinned=True)
    if table.ranks == 1:
        return Choice(table, alpha, "dense", "one rank, which sends nothing", sent)
    if table.size <= SMALL_BYTES:
        return Choice(table, alpha, "dense", f"at most {SMALL_BYTES // 1024} KiB: one short message", sent)
    order: list[WayName] = [*WAYS] if alpha.is_bound else ["dense", *(way for way in WAYS if way != "dense")]
    least = min(sent.values())
    way = next(way for way in order if way in sent and sent[way] <= least * (1 + 1e-9))
    others = [each for each in sent if each != way and sent[each] <= least * (1 + 1e-9)]
    why = "the fewest bytes" if not others else f"as few bytes as {' and '.join(others)}"
    return Choice(table, alpha, way, why, sent)


# -- what the user has said -------------------------------------------------------------------------------------


def first_fit(patterns: Mapping[str, object], name: str) -> str | None:
    """The first pattern that fits the name of a table."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def pattern_problems(key: str, patterns: Iterable[str], survey: Survey) -> list[str]:
    """One line for each pattern that fits no table."""
    names = [table.name for table in survey.tables]
    return [
        f"parallel.strategy.{key}: {pattern!r} fits no table with sparse=True{_hint(pattern, names, survey.others)}"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def _hint(pattern: str, names: Sequence[str], others: Sequence[str]) -> str:
    dense = next((name for name in others if fnmatchcase(name, pattern)), None)
    if dense is not None:
        return f", but {dense!r}, whose gradient is dense: give its embedding sparse=True"
    close = nearest(pattern, list(names))
    if close is not None:
        return f"; did you mean {close!r}?"
    if not names:
        return ": the model has none (layers.Embedding(.., sparse=True) is one)"
    return f"; the tables are {', '.join(map(repr, names))}"


def way_problems(ways: Mapping[str, WayName], survey: Survey) -> list[str]:
    """One line for each way that a table has been given and cannot take."""
    problems = pattern_problems("ways", ways, survey)
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
        elif ways[pattern] == "owners" and table.held[0] < table.ranks:
            problems.append(
                f"{what} has {table.held[0]} rows, fewer than the {table.ranks} ranks that would own them: use "
                f"'gather' or 'dense'"
            )
    return problems
