"""What a config's plan sends in a step for each parameter, found out in one process before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from colossus.comm.accounting import sent
from colossus.config import Config, ConfigError
from colossus.config.plans import strategy_options
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.make_loaders import loaders_of
from colossus.data_parallel.options.exact_options import HybridOptions
from colossus.gradients.axes import gradient_sum_axes
from colossus.layout.parameter import spec_of
from colossus.registry import MODELS, STRATEGIES
from colossus.sparse.choice import Choice, Survey, TableFacts, choose, first_fit
from colossus.sparse.cost import WAYS, WayName, bytes_sent, union_of_uniform
from colossus.sparse.survey import survey


@dataclass(frozen=True)
class Hosts:
    """Where rows are added up inside of hosts before they leave them.

    Attributes:
        number: of hosts.
        ranks: of each.
    """

    number: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class DenseParameter:
    """A parameter whose gradient is dense.

    Attributes:
        shape: of the whole, where the parameter is one logical parameter.
        held: on a rank.
        size: bytes on a rank.
        ranks: over which the gradient is summed.
    """

    name: str
    shape: tuple[int, ...]
    held: tuple[int, ...]
    size: int
    ranks: int

    def sent(self, hosts: Hosts) -> float:
        """By a rank, or by a host of several, all-reduced."""
        return sent("all_reduce", hosts.number if hosts.number > 1 else self.ranks, self.size)


@dataclass(frozen=True)
class TableForecast:
    """A table, its way, and what a step sends.

    Attributes:
        alpha: the part of its rows that a rank touches in a step.
        source: of it: given in the config; of a batch: the different integers in it that are rows, an upper bound
            where not all of them are looked up; or unknown, and then 1 (ids that are computed from others).
        sent: way -> bytes that a rank, or a host of several, sends in a step; ways that the table cannot take are not
            there.
    """

    choice: Choice
    alpha: float
    source: Literal["given", "batch", "unknown"]
    sent: dict[WayName, float]

    @property
    def table(self) -> TableFacts:
        return self.choice.table


@dataclass(frozen=True)
class Forecast:
    """Of a plan.

    Attributes:
        tables: under a strategy that sends no rows all are dense, and say what hybrid would take.
    """

    strategy: Any
    tables: tuple[TableForecast, ...]
    dense: tuple[DenseParameter, ...]
    hosts: Hosts


def forecast(config: Config) -> Forecast:
    """Of a resolved config with a model.

    Raises:
        ConfigError: for a model that cannot be built under the plan, and for what the strategy refuses.
    """
    if config.model is None:
        raise ConfigError("model: the config has none, so nothing is known of its parameters", config.source)
    spec = config.model.spec()
    strategy = STRATEGIES.build(config.parallel.data_strategy)
    found = Survey()
    dense: list[DenseParameter] = []

    def look(model: nn.Module) -> None:
        nonlocal found
        found = survey(model, context)
        tables = {table.name for table in found.tables}
        for name, param in model.named_parameters():
            if name not in tables and param.requires_grad and not isinstance(param, UninitializedParameter):
                dense.append(_dense(name, param, context))

    try:
        context = ParallelContext.from_config(config, connect=False)
        build(lambda: MODELS.build(spec), context, materialize=False, prepare=look)
        strategy.check_tables(found)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), config.source) from error
    own = strategy_options(config)
    options = own if isinstance(own, HybridOptions) else HybridOptions(aggregate=False)
    data = config.parallel.data or 1
    per_host = options.ranks_per_host(data)
    hosts = Hosts()
    if per_host is not None and options.aggregate is not False and data > per_host:
        hosts = Hosts(data // per_host, per_host)
    ids = _integers_of_a_batch(config) if found.untied else None
    tables = []
    for table in found.tables:
        choice = choose(table, options.way_of(table.name))
        if options is not own:
            choice = replace(choice, way="dense", why=f"hybrid: {choice.way}")
        tables.append(_forecast(choice, options, ids, hosts))
    return Forecast(strategy, tuple(tables), tuple(dense), hosts)


def _forecast(choice: Choice, options: HybridOptions, ids: Tensor | None, hosts: Hosts) -> TableForecast:
    table, alpha = choice.table, 1.0
    source: Literal["given", "batch", "unknown"] = "unknown"
    if (pattern := first_fit(options.alpha, table.name)) is not None:
        alpha, source = options.alpha[pattern], "given"
    elif ids is not None and (rows := int(((ids >= 0) & (ids < table.shape[0])).sum())):
        alpha, source = rows / max(1, table.shape[0]), "batch"
    ways = ("dense",) if table.tied is not None else tuple(w for w in WAYS if w != "owners" or table.can_be_owned)
    number, touched = table.ranks, alpha
    if hosts.number > 1:
        number, touched = hosts.number, union_of_uniform(alpha, hosts.ranks)
    return TableForecast(choice, alpha, source, {way: bytes_sent(way, number, table.size, touched) for way in ways})


def _integers_of_a_batch(config: Config) -> Tensor | None:
    """The different integers of the first batch of a data rank; None without data."""
    if config.data is None:
        return None
    try:
        loaders = loaders_of(config, config.data, data_rank=0, data_size=config.parallel.data or 1, device="cpu")
        batch = loaders.train.peek()
    except Exception:  # of a user's own data code: training raises it again
        return None
    integers = [x.flatten() for x in tree_leaves(batch) if isinstance(x, Tensor) and not x.is_floating_point()]
    return torch.unique(torch.cat([x.to(torch.int64) for x in integers])) if integers else None


def _dense(name: str, param: nn.Parameter, context: ParallelContext) -> DenseParameter:
    shards = spec_of(param).shards
    shape = shards[0].shape if len(shards) == 1 else (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
    held = tuple(param.shape)
    size = math.prod(held) * context.precision.params.itemsize
    return DenseParameter(name, shape, held, size, context.size(gradient_sum_axes(param, context)))
