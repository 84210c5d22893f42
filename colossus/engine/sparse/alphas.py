"""Alpha: the part of a table's rows that a step touches, before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from colossus.engine.sparse.choice import Alpha, Parties, TableFacts, first_fit
from colossus.engine.sparse.cost import union_of_uniform


def distinct(calls: Sequence[Tensor], parts: int = 1) -> list[Tensor]:
    """The distinct ids of each of some ranks that share the samples of a data rank evenly, over all lookups."""
    chunks = [[ids.flatten().tensor_split(parts)[part] for ids in calls] for part in range(parts)]
    return [torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *each])) for each in chunks]


def given(tables: Sequence[TableFacts], said: Mapping[str, float], parties: Parties) -> dict[str, Alpha]:
    """What the config says, by name of the table; of ranks that share a host as if ids were uniform."""
    found = {}
    for table in tables:
        if (pattern := first_fit(said, table.name)) is not None:
            members = max(1, table.ranks // parties.hosts)
            found[table.name] = Alpha(said[pattern], union_of_uniform(said[pattern], members), "given")
    return found


def bound(table: TableFacts, num_ids: int | None, parties: Parties) -> Alpha:
    """The largest that alpha can be where a data rank's batch has so many integers; None: nothing is known."""
    if num_ids is None:
        return Alpha(1.0, 1.0, "unknown")
    most = num_ids / table.per_data / max(1, table.shape[0])
    return Alpha(min(1.0, most), min(1.0, most * max(1, table.ranks // parties.hosts)), "bound")


def touched(table: TableFacts, calls: Sequence[Tensor]) -> float:
    """Of a rank, from the lookups of its data rank: the mean over those that share its samples."""
    return mean([len(part) for part in distinct(calls, table.per_data)]) / max(1, table.shape[0])


def touched_together(table: TableFacts, ids: Sequence[Tensor]) -> float:
    """By several ranks, from the ids of each."""
    (union,) = distinct(ids)
    return len(union) / max(1, table.shape[0])


def mean_of(found: Sequence[tuple[float, float]]) -> Alpha:
    """From what was measured by several ranks: of a rank, and of its host."""
    return Alpha(mean([rank for rank, _ in found]), mean([host for _, host in found]), "measured")


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
