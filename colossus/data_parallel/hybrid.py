"""Every parameter by the cheapest exact way: dense gradients all-reduced, those of tables by rows."""

from __future__ import annotations

from typing import Any

from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.all_reduce import AllReduce
from colossus.data_parallel.options.exact_options import HybridOptions
from colossus.gradients.bucket_sum import Hosts
from colossus.sparse.choice import Choice, Survey, choose, way_problems


class Hybrid(AllReduce):
    """Exact. Dense gradients are all-reduced in buckets; tables (``sparse=True``) are held and updated by ranks that
    own their rows, which sends the fewest bytes, after Parallax (1808.02621).

    Attributes:
        choices: by full name of the table.
        hosts: over which data ranks are spread; None where nobody asks, or hosts have unequal numbers of them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = HybridOptions(**options)
        self.partitions = self.options.partitions
        self.choices: dict[str, Choice] = {}
        self.hosts: Hosts | None = None

    def check_tables(self, found: Survey) -> None:
        if problems := way_problems(self.options.ways, found):
            raise ValueError("; ".join(problems))
        self.choices = {table.name: choose(table, self.options.way_of(table.name)) for table in found.tables}

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        if self.choices:
            self.hosts = self._hosts(context)
        super().prepare(model, context)

    def choices_made(self) -> list[str]:
        return [choice.in_words for choice in self.choices.values()]

    def _hosts(self, context: ParallelContext) -> Hosts | None:
        per_host = self.options.ranks_per_host(context.size("data"))
        if per_host is not None:
            return Hosts.given(context, per_host)
        if context.size("data") == 1:
            return None
        try:
            return Hosts.found(context)
        except ValueError:  # on all ranks: as many data ranks on each are what two levels need
            return None

    def way_of(self, name: str, shape: tuple[int, ...], ranks: int) -> str:
        return self.choices[name].way

    def hosts_of_rows(self) -> Hosts | None:
        return self.hosts if self.hosts is not None and self.hosts.are_levels else None
