"""Options of the hybrid of all-reduce and owners of rows. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from colossus.config import Config
from colossus.data_parallel.options.base import Count, CountOrZero, StrategyOptions
from colossus.data_parallel.options.exact import HierarchicalOptions
from colossus.sparse.choice import first_fit
from colossus.sparse.cost import WayName

Fraction = Annotated[float, Field(gt=0, le=1)]


class HybridOptions(StrategyOptions):
    #: pattern of full names of tables -> "dense", "gather" or "owners"; the first that fits is taken
    ways: dict[str, WayName] = {}
    #: pattern of full names of tables -> part of the rows that a rank touches in a step, for ``show --strategy``
    alpha: dict[str, Fraction] = {}
    #: whether ranks of a host add up rows before these leave it; "auto": where there are several hosts
    aggregate: Literal["auto"] | bool = "auto"
    #: over how many hosts the data ranks are spread; None: found by what ranks know of their machines
    hosts: Count | None = None
    #: data ranks on each host, neighbours along data; the same said otherwise
    per_host: Count | None = None
    #: into how many parts of neighbouring rows an owned table is cut; "search": found in the first steps
    partitions: Count | Literal["search"] | None = None
    #: steps after which parts are given to owners by the rows that were touched; 0: never
    balance_after: CountOrZero = 20

    def describe(self, data: int) -> str:
        said = [f"{pattern} by {way}" for pattern, way in self.ways.items()]
        return "exact: tables by rows" + (f"; {', '.join(said)}" if said else "")

    def way_of(self, name: str) -> WayName | None:
        """What the user has said of a table."""
        pattern = first_fit(self.ways, name)
        return None if pattern is None else self.ways[pattern]

    def ranks_per_host(self, data: int) -> int | None:
        """Data ranks on each host, None where neither number is given."""
        return self._hosts_alone.ranks_per_host(data)

    def check(self, config: Config) -> list[str]:
        return super().check(config) + self._hosts_alone.check(config)

    @property
    def _hosts_alone(self) -> HierarchicalOptions:
        return HierarchicalOptions(hosts=self.hosts, per_host=self.per_host)
