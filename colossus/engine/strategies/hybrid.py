"""Every parameter by the cheapest exact way: dense gradients all-reduced, those of tables by rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.engine.hosts import Hosts
from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parts import ModelParts
from colossus.engine.sparse import alphas
from colossus.engine.sparse.balance import Balance
from colossus.engine.sparse.choice import (
    Alpha,
    Choice,
    Parties,
    Survey,
    TableFacts,
    choose,
    pattern_problems,
    way_problems,
)
from colossus.engine.sparse.samples import Samples
from colossus.engine.strategies.all_reduce import AllReduce
from colossus.engine.strategies.options.hybrid import HybridOptions

log = logging.getLogger("colossus.engine")


class Hybrid(AllReduce):
    """Exact. Dense gradients are all-reduced in buckets; of each table (``sparse=True``) the gradient of its rows takes
    the way that sends the fewest bytes, after Parallax (1808.02621).

    Attributes:
        choices: by full name of the table.
        parties: who sends.
        hosts: over which data ranks are spread; None where nobody asks, or hosts have unequal numbers of them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = HybridOptions(**options)
        self.choices: dict[str, Choice] = {}
        self.hosts: Hosts | None = None
        self.parties = Parties()

    def check_tables(self, found: Survey) -> None:
        problems = way_problems(self.options.ways, found) + pattern_problems("alpha", self.options.alpha, found)
        if problems:
            raise ValueError("; ".join(problems))

    def choose_ways(self, found: Survey, samples: Samples, context: ParallelContext) -> None:
        options = self.options
        if not found.tables:
            return
        self.hosts = self._hosts(context)
        hosts = self.hosts_of_rows()
        self.parties = parties = Parties(len(hosts.sets) if hosts is not None else 1, hosts is not None)
        known = alphas.given(found.tables, options.alpha, parties)
        open_tables = [table for table in found.untied if table.name not in known]
        if any(table.ranks > 1 for table in open_tables):
            known |= self._agreed(open_tables, samples, context, parties)
        for table in found.tables:
            alpha = known.get(table.name) or alphas.bound(table, None, parties)
            self.choices[table.name] = choose(table, alpha, parties, options.way_of(table.name))
        if samples.failure and context.is_logging_rank:
            log.warning(
                "alpha of %s could not be measured (%s), so it is an upper bound; parallel.strategy.alpha gives it",
                ", ".join(table.name for table in open_tables),
                samples.failure,
            )

    def chosen_ways(self) -> tuple[Mapping[str, Choice], Parties]:
        return self.choices, self.parties

    def heading(self) -> list[str]:
        return [choice.in_words for choice in self.choices.values()]

    def in_short(self) -> str:
        by_way: dict[str, list[str]] = {}
        for name, choice in self.choices.items():
            by_way.setdefault(choice.way, []).append(name)
        return ", ".join(f"{way}: {_few(names)}" for way, names in by_way.items())

    def _hosts(self, context: ParallelContext) -> Hosts | None:
        per_host = self.options.ranks_per_host(context.size("data"))
        if per_host is not None:
            return Hosts.given(context, per_host)
        if context.size("data") == 1:
            return None
        try:
            return Hosts.found(context)
        except ValueError as error:  # on all ranks: as many data ranks on each are what two levels need
            if self.options.aggregate is True:
                raise ValueError(f"parallel.strategy.aggregate = True: {error}") from error
            return None

    def _agreed(
        self, tables: Sequence[TableFacts], samples: Samples, context: ParallelContext, parties: Parties
    ) -> dict[str, Alpha]:
        """Alpha of tables of which the config says nothing: the same on all ranks."""
        world = context.group(context.grid.names)
        lookups = samples.lookups()
        everyone = all_gather_object((lookups is not None, samples.num_integers()), world)
        if lookups is None or not all(is_known for is_known, _ in everyone):
            numbers = [number for _, number in everyone if number is not None]
            most = max(numbers) if len(numbers) == world.size else None
            return {table.name: alphas.bound(table, most, parties) for table in tables}
        own = {}
        for table in tables:
            calls = lookups[0][table.name]
            host = alphas.distinct(calls)
            if (hosts := self.hosts_of_rows()) is not None:
                host = all_gather_object(host[0], hosts.inside(("data",)))
            own[table.name] = alphas.touched(table, calls), alphas.touched_together(table, host)
        by_rank = all_gather_object(own, world)
        return {table.name: alphas.mean_of([found[table.name] for found in by_rank]) for table in tables}

    def way_of(self, name: str, shape: tuple[int, ...], ranks: int) -> str:
        return self.choices[name].way

    def hosts_of_rows(self) -> Hosts | None:
        hosts = self.hosts if self.options.aggregate else None
        return hosts if hosts is not None and hosts.are_levels else None

    def partitions(self) -> int | None:
        partitions = self.options.partitions
        return partitions if isinstance(partitions, int) else None

    # -- the places of rows -------------------------------------------------------------------------------

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        owned = self.tables.owned() if self.tables is not None else []
        options = self.options
        self._balance = Balance(owned, parts.context, after=options.balance_after, partitions=options.partitions)

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        super().optimizer_made(optimizer)
        self._optimizer = optimizer

    def begin_step(self, step: int) -> None:
        self._balance.begin_step()
        super().begin_step(step)

    def after_step(self, step: int) -> None:
        super().after_step(step)
        self._balance.after_step(self._optimizer)

    def report(self) -> dict[str, float]:
        return super().report() | self._balance.report()


def _few(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= 3 else f"{len(names)} tables"
