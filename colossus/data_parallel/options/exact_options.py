"""Options of the strategies that sum gradients over all replicas in each step. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from colossus.arithmetic import either
from colossus.config import Config
from colossus.config.schema import Parallel, ZeroSection
from colossus.data_parallel.options.strategy_options import Count, CountOrZero, StrategyOptions, spread_experts
from colossus.sparse.choice import WayName, first_fit

_POWERSGD = ("rank", "start_step", "min_compression_rate")


class ZeroOptions(StrategyOptions):
    """Options of ZeRO, which ``parallel.zero`` sets."""

    #: 1: optimizer state; 2: and gradients; 3: and parameters
    stage: Annotated[int, Field(ge=1, le=3)]
    #: whether the optimizer's parameters and state are in the memory of the host
    offload: bool = False


class AllReduceOptions(StrategyOptions):
    #: the compression of gradients along data, which makes the strategy inexact; None: none
    compress: Literal["bf16", "powersgd"] | None = None
    #: PowerSGD: the rank of the factors
    rank: Count = 1
    #: PowerSGD: the number of first steps that are not compressed
    start_step: CountOrZero = 10
    #: PowerSGD: matrices travel as factors where they have more than this many times the factors' elements
    min_compression_rate: Annotated[float, Field(ge=0)] = 2.0

    def describe(self, data: int) -> str:
        if self.compress is None or data == 1:
            return ""
        way = f"matrices of rank {self.rank}" if self.compress == "powersgd" else self.compress
        return f"inexact: gradients travel as {way}; replicas stay equal"

    def check(self, config: Config) -> list[str]:
        problems = super().check(config)
        keys = [key for key in _POWERSGD if key in self.model_fields_set]
        if keys and self.compress != "powersgd":
            problems.append(
                f"parallel.strategy.{keys[0]} has no effect with compress = {self.compress!r}; it is for 'powersgd'"
            )
        reduce = config.train.precision.reduce
        if self.compress == "bf16" and reduce in ("bf16", "fp16"):
            problems.append(
                f"parallel.strategy.compress = {self.compress!r}: gradients are summed in {reduce} already "
                f"(train.precision.reduce); leave one of the two out"
            )
        if self.compress is not None:
            problems += spread_experts(config, "with compress gradients are summed along data as a whole")
        if self.compress is not None and config.parallel.zero.stage:
            problems.append(
                f"parallel.strategy.compress = {self.compress!r}: ZeRO's sums are not compressed; leave out one of "
                f"compress and zero"
            )
        return problems


class HostOptions(StrategyOptions):
    """The options of strategies that know which data ranks share a host."""

    #: the number of hosts over which the data ranks are spread; None: ranks compare the names of their machines
    hosts: Count | None = None
    #: the number of data ranks on each host, consecutive along data; instead of ``hosts``
    per_host: Count | None = None

    def ranks_per_host(self, data: int) -> int | None:
        """Return the number of data ranks on each host, or None where neither option is set."""
        return self.per_host if self.hosts is None else max(1, data // self.hosts)

    def check(self, config: Config) -> list[str]:
        problems = super().check(config)
        data = config.parallel.data
        assert data is not None
        if self.hosts is not None and self.per_host is not None:
            problems.append("parallel.strategy: hosts and per_host say the same; set one of the two")
        for key in ("hosts", "per_host"):
            number = getattr(self, key)
            if number is not None and data % number:
                fits = either(divisor for divisor in range(1, data + 1) if data % divisor == 0)
                problems.append(
                    f"parallel.strategy.{key} = {number} does not divide data {data}: each host has as many data "
                    f"ranks; use {fits}"
                )
        return problems


class HierarchicalOptions(HostOptions, AllReduceOptions):
    def describe(self, data: int) -> str:
        per_host = self.ranks_per_host(data)
        where = "hosts are found" if per_host is None else f"hosts of {per_host} data rank{'s' if per_host > 1 else ''}"
        return "; ".join(part for part in (where, super().describe(data)) if part)

    def zero_of(self, parallel: Parallel) -> ZeroSection:
        """Return ZeRO over the data ranks of a host, replicated over hosts."""
        assert parallel.data is not None
        if parallel.zero.shard is not None:
            return parallel.zero
        return parallel.zero.model_copy(update={"shard": self.ranks_per_host(parallel.data)})

    def check(self, config: Config) -> list[str]:
        problems = super().check(config) + spread_experts(config, "sums along data are in two levels")
        zero = config.parallel.zero
        if zero.stage and zero.shard is None:
            problems.append(
                f"parallel.strategy: zero = {zero.stage} is over the data ranks of each host, whose number must be "
                f"known: set hosts= (as --nnodes) or per_host="
            )
        return problems


class HybridOptions(HostOptions):
    #: the number of parts of consecutive rows into which an owned table is cut; they go to the owners in turn. None:
    #: one for each owner
    partitions: Count | None = None
    #: pattern of full names of tables -> "dense", "gather" or "owners"; the first that fits decides
    ways: dict[str, WayName] = {}

    def describe(self, data: int) -> str:
        ways = [f"{pattern} by {way}" for pattern, way in self.ways.items()]
        return "exact: tables by rows" + (f"; {', '.join(ways)}" if ways else "")

    def way_of(self, name: str) -> WayName | None:
        """Return the way that the options name for a table, or None."""
        pattern = first_fit(self.ways, name)
        return None if pattern is None else self.ways[pattern]
