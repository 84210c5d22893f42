"""What a config's plan sends in a step for each parameter, found out in one process before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from colossus.comm.cost import sent
from colossus.config import Config, ConfigError
from colossus.config.plans import strategy_options
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import shard_of_batch
from colossus.data.make_loaders import loaders_of
from colossus.engine.gradients.axes import gradient_sum_axes
from colossus.engine.sparse import alphas
from colossus.engine.sparse.choice import Alpha, Choice, Parties, Survey, choose
from colossus.engine.sparse.samples import Samples
from colossus.engine.sparse.survey import survey
from colossus.engine.strategies.options.hybrid import HybridOptions
from colossus.layout.parameter import spec_of
from colossus.registry import MODELS, STRATEGIES

#: data ranks whose batches are looked at
_MOST_RANKS = 16


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

    def sent(self, parties: Parties) -> float:
        """By a party, all-reduced."""
        return sent("all_reduce", parties.hosts if parties.are_hosts else self.ranks, self.size)


@dataclass(frozen=True)
class Forecast:
    """Of a plan.

    Attributes:
        choices: for each table; under a strategy without ways all are dense, and say what hybrid would take.
        failure: why alpha could not be measured; empty where it was, or was given.
    """

    strategy: Any
    choices: tuple[Choice, ...]
    dense: tuple[DenseParameter, ...]
    parties: Parties
    failure: str


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
    parties = Parties(1 if per_host is None else data // per_host, options.aggregate is not False)
    known = alphas.given(found.tables, options.alpha, parties)
    failure = ""
    if open_tables := [table for table in found.untied if table.name not in known]:
        samples = Samples(config, lambda: MODELS.build(spec), lambda: _batches(config))
        lookups = samples.lookups()
        if lookups is None:
            failure = samples.failure
            known |= {table.name: alphas.bound(table, samples.num_integers(), parties) for table in open_tables}
        else:
            of_host = max(1, min(per_host or 1, len(lookups)))
            for table in open_tables:
                ids = [alphas.distinct(each[table.name])[0] for each in lookups]
                groups = [ids[first : first + of_host] for first in range(0, len(ids), of_host)]
                together = [alphas.touched_together(table, group) for group in groups if len(group) == of_host]
                alone = [alphas.touched(table, each[table.name]) for each in lookups]
                known[table.name] = Alpha(alphas.mean(alone), alphas.mean(together), "measured")
    choices = []
    for table in found.tables:
        alpha = known.get(table.name) or alphas.bound(table, None, parties)
        choice = choose(table, alpha, parties, options.way_of(table.name))
        choices.append(choice if options is own else replace(choice, way="dense", why=f"hybrid: {choice.way}"))
    return Forecast(strategy, tuple(choices), tuple(dense), parties, failure)


def _dense(name: str, param: nn.Parameter, context: ParallelContext) -> DenseParameter:
    shards = spec_of(param).shards
    shape = shards[0].shape if len(shards) == 1 else (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
    held = tuple(param.shape)
    size = math.prod(held) * context.precision.params.itemsize
    return DenseParameter(name, shape, held, size, context.size(gradient_sum_axes(param, context)))


def _batches(config: Config) -> Sequence[Any]:
    """Of the first data ranks; of the first alone where the global batch cannot be read in one place."""
    data = config.parallel.data or 1
    if config.data is None:
        return ()
    try:
        whole = loaders_of(config, config.data, data_rank=0, data_size=1, device="cpu").train.peek()
        return [shard_of_batch(whole, rank, data) for rank in range(min(data, _MOST_RANKS))]
    except ValueError:
        return [loaders_of(config, config.data, data_rank=0, data_size=data, device="cpu").train.peek()]
