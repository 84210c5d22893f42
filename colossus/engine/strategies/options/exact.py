"""Options of the strategies that sum gradients over all replicas in each step. No torch."""

from __future__ import annotations

from colossus.arithmetic import either
from colossus.config import Config
from colossus.engine.strategies.options.base import Count, StrategyOptions


class HierarchicalOptions(StrategyOptions):
    #: over how many hosts the data ranks are spread; None: found by what ranks know of their machines
    hosts: Count | None = None
    #: data ranks on each host, neighbours along data; the same said otherwise
    per_host: Count | None = None

    def ranks_per_host(self, data: int) -> int | None:
        """Data ranks on each host, None where neither number is given."""
        return self.per_host if self.hosts is None else data // self.hosts

    def check(self, config: Config) -> list[str]:
        problems = super().check(config)
        data = config.parallel.data
        assert data is not None
        for key in ("hosts", "per_host"):
            number = getattr(self, key)
            if number is not None and data % number:
                fits = either(divisor for divisor in range(1, data + 1) if data % divisor == 0)
                problems.append(
                    f"parallel.strategy.{key} = {number} does not divide data {data}: as many data ranks are on each host; use {fits}"
                )
        if not problems and self.hosts is not None and self.per_host is not None and self.hosts * self.per_host != data:
            problems.append(
                f"parallel.strategy: hosts {self.hosts} x per_host {self.per_host} = {self.hosts * self.per_host}, but "
                f"data = {data}: give one of the two"
            )
        return problems
