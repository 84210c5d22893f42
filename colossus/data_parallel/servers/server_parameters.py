"""The trained parameters of a replica at the servers: made, pulled, pushed, and saved."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.data_parallel.options.server_options import ServerOptions
from colossus.data_parallel.servers.connection import connect
from colossus.data_parallel.servers.server_optimizer import ServerOptimizer
from colossus.data_parallel.servers.server_shards import (
    Gradient,
    Pull,
    ServerRows,
    ServerShard,
    SharedShards,
    gradients_of,
    server_shards,
)
from colossus.gradients.host_transfer import HostRead
from colossus.gradients.reduction import ModelParts
from colossus.rows.row_gradient import RowGradient
from colossus.server.rpc_client import Handle
from colossus.sparse.table import Table

T = TypeVar("T")


class ServerParameters:
    """What a rank has to do with the servers.

    Each box of a logical parameter is one tensor there. Of the ranks of a replica the first that holds a box pushes it
    and pulls it, and the others take what that one has pulled.

    Args:
        params: stored parameters that are trained.
        on_progress: called whenever something has moved.
        tables: with sparse gradients, of this rank.

    Attributes:
        shards: of this rank, those that the optimizer updates.
        is_placed: whether the servers have the parameters.
    """

    def __init__(
        self,
        options: ServerOptions,
        parts: ModelParts,
        params: Sequence[nn.Parameter],
        on_progress: Callable[[], None],
        tables: Iterable[Table] = (),
    ) -> None:
        self._options, self._context, self._params = options, parts.context, list(params)
        context = parts.context
        self.shards, self._sizes = server_shards(parts, params)
        self._shared = SharedShards(parts, self.shards, self._sizes)
        self._world, self._data = context.group(context.grid.names), context.group("data")
        self._connection = connect(options.servers, context, on_progress, self._data.ranks)
        self._servers = self._connection.servers
        self._optimizer: ServerOptimizer | None = None
        self.is_placed = self._is_made = False
        self._begin: Sequence[Tensor] | None = None
        self._pushes: list[Handle[dict[str, int | None]]] = []
        self._clock: Handle[None] | None = None
        #: the last update of tables
        self._applied: Handle[None] = Handle((), lambda replies: None)
        #: this rank's parts of the step that runs
        self._given: Handle[None] = Handle((), lambda replies: None)
        #: metrics since the last report, and the staleness of the stalest tensor of each push
        self._numbers: dict[str, float] = defaultdict(float)
        self._staleness: list[int] = []
        #: names of tables of which steps pull rows
        self._by_rows: set[str] = set()
        if not options.has_own_optimizer:
            self._pull_by_rows(tables)

    def _pull_by_rows(self, tables: Iterable[Table]) -> None:
        """Of the tables that this rank shares with no other of its replica; others are pulled whole."""
        shard_of = {id(shard.param): shard for shard in self.shards if not shard.is_shared}
        for table in tables:
            shard = shard_of.get(id(table.param))
            if shard is not None:
                table.way = ServerRows(table.param, table.num_rows, partial(self._pull_rows, shard.name))
                self._by_rows.add(shard.name)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """That which the servers apply; without one workers have their own.

        Raises:
            ValueError: the servers do not know it.
        """
        self._optimizer = ServerOptimizer(optimizer, self._context)
        self.shards = self._optimizer.updated(self.shards)

    def _wait(self, handle: Handle[T]) -> T:
        """For what depends on other workers."""
        return self._servers.wait_or_name_missing(handle, self._context.timeout.total_seconds())

    @property
    def _first(self) -> list[ServerShard]:
        return [shard for shard in self.shards if shard.is_first]

    # -- making -------------------------------------------------------------------------------------------

    def begin_with(self, values: Sequence[Tensor] | None) -> None:
        """What `place` makes instead of the parameters, for each of these."""
        self._begin = values

    @torch.no_grad()
    def place(self) -> None:
        """Let the servers have what the first replica has, unless they do: parameters, and the state of the optimizer,
        which is theirs from then on. Collective over all ranks.
        """
        if self.is_placed:
            return
        self.wait_for_pushes()
        begin = self._params if self._begin is None else self._begin
        value_of = {id(param): value.detach() for param, value in zip(self._params, begin, strict=True)}
        own = {shard.name: shard.local(value_of[id(shard.param)]).cpu() for shard in self._first}
        source_of, rule_of = self._sources_and_rules()
        names = [size.name for size in self._sizes if size.name in source_of]
        if self._is_made:
            self._servers.free(names).wait()
        sizes = {size.name: size for size in self._sizes}
        for source in sorted(set(source_of.values())):
            of_source = [name for name in names if source_of[name] == source]
            tensors = {
                name: own[name]
                if source == self._context.rank
                else torch.empty(sizes[name].shape, dtype=sizes[name].dtype, device="meta")
                for name in of_source
            }
            rules = {name: {"type": rule_of[name]} for name in of_source if rule_of[name]}
            making = self._servers.create(tensors, optimizers=rules, source=source, workers=self._world.ranks)
            self._wait(making)
        if self._optimizer is not None:
            mine = {name for name, source in source_of.items() if source == self._context.rank}
            self._optimizer.give_state(self._servers, self.shards, mine)
        if self._options.max_staleness is not None:
            self._servers.clock(0, 0).wait()  # the steps before a load do not count
        collectives.barrier(self._world, self._context.device)
        self.is_placed, self._is_made, self._begin = True, True, None
        self._clock = None

    def _sources_and_rules(self) -> tuple[dict[str, int], dict[str, str | None]]:
        """Of each tensor the rank whose values count, and the rule of its optimizer."""
        is_source = self._data.index == 0
        optimizer = self._optimizer
        own = [
            (shard.name, None if optimizer is None else optimizer.rule_of(shard)) for shard in self._first if is_source
        ]
        source_of: dict[str, int] = {}
        rules: dict[str, str | None] = {}
        for rank, held in zip(self._world.ranks, all_gather_object(own, self._world), strict=True):
            for name, rule in held:
                source_of[name], rules[name] = rank, rule
        return source_of, rules

    # -- pulling --------------------------------------------------------------------------------------------

    def pull(self, *, tables: bool = False) -> Pull:
        """Start to pull the values of this rank's shards, into memory of their own.

        Args:
            tables: also whole tables of which steps pull rows.
        """
        return self._start_pull([shard for shard in self.shards if tables or shard.name not in self._by_rows])

    def _start_pull(self, shards: Sequence[ServerShard]) -> Pull:
        values = [shard.host_memory() for shard in shards]
        into = {shard.name: value for shard, value in zip(shards, values, strict=True) if shard.is_first}
        return self._coming(self._servers.pull(into), shards, values, into)

    def _coming(
        self, handle: Handle[None], shards: Sequence[ServerShard], values: Sequence[Tensor], into: Mapping[str, Tensor]
    ) -> Pull:
        self._numbers["pull_bytes"] += sum(value.nbytes for value in into.values())
        return Pull(handle, shards, values, self._shared, self._waited)

    @torch.no_grad()
    def pull_tables(self) -> None:
        """Whole tables of which steps pull rows, into the parameters."""
        shards = [shard for shard in self.shards if shard.name in self._by_rows]
        if shards and self.is_placed:
            for shard, value in self._start_pull(shards).own():
                shard.local().copy_(value, non_blocking=True)

    def _pull_rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows [n, ..] of a tensor, of ascending distinct ids [n]."""
        began = time.perf_counter()
        rows = self._servers.pull_rows({name: ids.cpu()}).wait()[name]
        self._waited(time.perf_counter() - began)
        self._numbers["pull_bytes"] += rows.nbytes
        return rows

    @torch.no_grad()
    def whole(self, pull: Pull) -> list[Tensor]:
        """What was pulled as tensors of the shape of each parameter; the rest is as it is here. Collective in a
        replica.
        """
        found = {id(param): param.detach().clone() for param in self._params}
        for shard, value in pull.wait():
            shard.local(found[id(shard.param)]).copy_(value, non_blocking=True)
        return [found[id(param)] for param in self._params]

    # -- synchronous steps ------------------------------------------------------------------------------------

    def accumulate(self, number: int) -> None:
        """Give this replica's sums of gradients, of step ``number``."""
        self._applied.wait()
        gradients = gradients_of(self._first)
        self._count_pushed(gradients)
        self._given = self._servers.accumulate(number, gradients)

    def squares(self, number: int) -> list[tuple[nn.Parameter, float]]:
        """Of what this rank pushes, the square of the norm of the sum over all workers: waits for them."""
        if not self._first:
            return []
        began = time.perf_counter()
        self._given.wait()  # a part that was refused would be waited for without end
        squares = self._wait(self._servers.squares(number, [shard.name for shard in self._first]))
        self._waited(time.perf_counter() - began)
        return [(shard.param, squares[shard.name]) for shard in self._first]

    def apply(self, number: int, scale: float | None, clip_value: float | None = None) -> Pull:
        """One update by the sums, times ``scale`` (None: none, they are forgotten), elements clipped to ``clip_value``
        after that, and what it makes of the values, but for the tables of which steps pull rows.
        """
        assert self._optimizer is not None
        shards = [shard for shard in self.shards if shard.name not in self._by_rows]
        values = [shard.local() if shard.local().device.type == "cpu" else shard.host_memory() for shard in shards]
        into = {shard.name: value for shard, value in zip(shards, values, strict=True) if shard.is_first}
        factors = {"scale": 0.0 if scale is None else scale, "clip_value": clip_value}
        options_of = self._optimizer.options_of(self._first, **factors)
        apply = partial(self._servers.apply, number, options_of=options_of, found_inf=scale is None)
        # who pulls rows later is served after this
        self._applied = apply([shard.name for shard in self._first if shard.name not in into])
        return self._coming(apply(list(into), into=into), shards, values, into)

    # -- pushing ----------------------------------------------------------------------------------------------

    def push_gradients(self) -> None:
        """To the optimizer at the servers, divided and clipped as they are."""
        assert self._optimizer is not None
        gradients = gradients_of(self._first)
        self._push(gradients, "gradient", self._optimizer.options_of(self._first))

    def add(self, values: Sequence[Tensor]) -> None:
        """To the values at the servers, of each parameter."""
        value_of = {id(param): value for param, value in zip(self._params, values, strict=True)}
        coming = {shard.name: HostRead(shard.local(value_of[id(shard.param)])) for shard in self._first}
        self._push({name: value.wait() for name, value in coming.items()}, "add", {})

    def _push(self, values: Mapping[str, Gradient], rule: str, options_of: Mapping[str, Mapping[str, Any]]) -> None:
        self.wait_for_pushes()
        self._count_pushed(values)
        self._pushes.append(self._servers.push(values, rule, options_of=options_of))

    def wait_for_pushes(self) -> None:
        """Until all that this rank has pushed was applied."""
        began = time.perf_counter()
        while self._pushes:
            stale = self._pushes.pop(0).wait().values()
            if known := [each for each in stale if each is not None]:
                self._staleness.append(max(known))
        self._waited(time.perf_counter() - began)

    # -- clocks -----------------------------------------------------------------------------------------------

    def finish_step(self, step: int) -> None:
        """This rank has pushed what came of step ``step`` (from 0)."""
        if self._options.max_staleness is not None:
            self.wait_for_pushes()
            self._clock = self._servers.clock(step + 1, self._options.max_staleness)

    def wait_for_slowest(self) -> None:
        """Before a step, until the slowest worker is no more than ``max_staleness`` steps behind."""
        if self._clock is not None:
            began = time.perf_counter()
            self._wait(self._clock)
            self._clock = None
            self._waited(time.perf_counter() - began)

    # -- state ------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Mapping[str, Any]]:
        """What is kept for this rank's parameters, at the servers or here, as the optimizer of torch would keep it."""
        if self._optimizer is None or not self.is_placed:
            return optimizer.state
        self.wait_for_pushes()
        return self._optimizer.state(self._servers, self.shards)

    # -- besides ----------------------------------------------------------------------------------------------

    def _waited(self, seconds: float) -> None:
        self._numbers["server_wait_seconds"] += seconds

    def _count_pushed(self, values: Mapping[str, Gradient]) -> None:
        for value in values.values():
            arrays = (value.ids, value.rows) if isinstance(value, RowGradient) else (value,)
            self._numbers["push_bytes"] += sum(array.nbytes for array in arrays if array is not None)

    def report(self) -> dict[str, float]:
        """For the metrics of a step."""
        names = ("push_bytes", "pull_bytes", "server_wait_seconds")
        found = {name: self._numbers[name] for name in names}
        if stale := self._staleness:
            found |= {"staleness": sum(stale) / len(stale), "staleness_max": float(max(stale))}
        self._numbers.clear()
        self._staleness = []
        return found

    def close(self) -> None:
        self._connection.close()
