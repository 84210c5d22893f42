"""The trained parameters of a replica at the servers, which are placed, pulled, pushed and saved."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.host_transfer import HostRead
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
from colossus.gradients.reduction import ModelParts
from colossus.rows.row_gradient import RowGradient
from colossus.server.rpc_client import Handle
from colossus.sparse.table import Table

T = TypeVar("T")


class ServerParameters:
    """The trained parameters of a rank, as they are stored at the servers.

    Each box of a logical parameter is one tensor at the servers. The first rank of a replica that has a box pushes and
    pulls it, and the others of the replica receive the pulled values from it.

    Args:
        options: the options of the strategy.
        parts: the model of this rank.
        params: the stored parameters that are trained.
        on_progress: called whenever a reply has come.
        tables: this rank's tables with sparse gradients.

    Attributes:
        shards: the shards of this rank that the optimizer updates.
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
        #: the last update of tables, and this rank's sums of the step that runs
        self._applied: Handle[None] = Handle((), lambda replies: None)
        self._accumulated: Handle[None] = Handle((), lambda replies: None)
        #: metrics since the last report, and the staleness of the stalest tensor of each push
        self._numbers, self._staleness = defaultdict[str, float](float), list[int]()
        #: the names of tables that steps pull by rows
        self._by_rows: set[str] = set()
        if not options.has_own_optimizer:
            self._pull_by_rows(tables)

    def _pull_by_rows(self, tables: Iterable[Table]) -> None:
        """Make steps pull single rows of those tables that no other rank of the replica shares."""
        shard_of = {id(shard.param): shard for shard in self.shards if not shard.is_shared}
        for table in tables:
            shard = shard_of.get(id(table.param))
            if shard is not None:
                table.way = ServerRows(table.param, table.num_rows, partial(self._pull_rows, shard.name))
                self._by_rows.add(shard.name)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer that the servers apply, or raise ValueError where they cannot apply it."""
        self._optimizer = ServerOptimizer(optimizer, self._context)
        self.shards = self._optimizer.updated(self.shards)

    def _wait(self, handle: Handle[T]) -> T:
        """Wait for a reply that depends on other workers; a timeout names those that are missing."""
        return self._servers.wait_or_name_missing(handle, self._context.timeout.total_seconds())

    @property
    def _first(self) -> list[ServerShard]:
        return [shard for shard in self.shards if shard.is_first]

    # -- making -------------------------------------------------------------------------------------------

    def begin_with(self, values: Sequence[Tensor] | None) -> None:
        """Set the values, one for each parameter, that `place` sends instead of the parameters."""
        self._begin = values

    @torch.no_grad()
    def place(self) -> None:
        """Send parameters and optimizer state of the first replica to the servers, unless these have them.

        The optimizer's state is at the servers from then on. Collective over all ranks.
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
            self._optimizer.move_state(self._servers, self.shards, mine)
        if self._options.max_staleness is not None:
            self._servers.clock(0, 0).wait()  # the steps before a load do not count
        collectives.barrier(self._world, self._context.device)
        self.is_placed, self._is_made, self._begin = True, True, None
        self._clock = None

    def _sources_and_rules(self) -> tuple[dict[str, int], dict[str, str | None]]:
        """Return for each tensor the rank whose values count, and the rule that updates it."""
        is_source = self._data.index == 0
        optimizer = self._optimizer
        own = [
            (shard.name, None if optimizer is None else optimizer.rule_of(shard)) for shard in self._first if is_source
        ]
        source_of: dict[str, int] = {}
        rules: dict[str, str | None] = {}
        for rank, of_rank in zip(self._world.ranks, all_gather_object(own, self._world), strict=True):
            for name, rule in of_rank:
                source_of[name], rules[name] = rank, rule
        return source_of, rules

    # -- pulling --------------------------------------------------------------------------------------------

    def pull(self, *, tables: bool = False) -> Pull:
        """Start to pull the values of this rank's shards, into memory of their own.

        Args:
            tables: whether to pull the tables, too, that steps pull by rows.
        """
        return self._start_pull([shard for shard in self.shards if tables or shard.name not in self._by_rows])

    def _start_pull(self, shards: Sequence[ServerShard]) -> Pull:
        values = [shard.host_memory() for shard in shards]
        into = {shard.name: value for shard, value in zip(shards, values, strict=True) if shard.is_first}
        return self._make_pull(self._servers.pull(into), shards, values, into)

    def _make_pull(
        self, handle: Handle[None], shards: Sequence[ServerShard], values: Sequence[Tensor], into: Mapping[str, Tensor]
    ) -> Pull:
        self._numbers["pull_bytes"] += sum(value.nbytes for value in into.values())
        return Pull(handle, shards, values, self._shared, self._count_wait)

    @torch.no_grad()
    def pull_tables(self) -> None:
        """Pull the tables that steps pull by rows, whole, into the parameters."""
        shards = [shard for shard in self.shards if shard.name in self._by_rows]
        if shards and self.is_placed:
            for shard, value in self._start_pull(shards).own():
                shard.local().copy_(value, non_blocking=True)

    def _pull_rows(self, name: str, ids: Tensor) -> Tensor:
        """Pull the rows [n, ..] of ascending distinct ids [n] of a tensor."""
        began = time.perf_counter()
        rows = self._servers.pull_rows({name: ids.cpu()}).wait()[name]
        self._count_wait(time.perf_counter() - began)
        self._numbers["pull_bytes"] += rows.nbytes
        return rows

    @torch.no_grad()
    def whole(self, pull: Pull) -> list[Tensor]:
        """Return copies of all parameters with the pulled values in them. Collective in a replica."""
        copies = {id(param): param.detach().clone() for param in self._params}
        for shard, value in pull.wait():
            shard.local(copies[id(shard.param)]).copy_(value, non_blocking=True)
        return [copies[id(param)] for param in self._params]

    # -- synchronous steps ------------------------------------------------------------------------------------

    def accumulate(self, number: int) -> None:
        """Start to push this replica's sums of gradients of step ``number``."""
        self._applied.wait()
        gradients = gradients_of(self._first)
        self._count_pushed(gradients)
        self._accumulated = self._servers.accumulate(number, gradients)

    def squares(self, number: int) -> list[tuple[nn.Parameter, float]]:
        """Return the squared norm of the sum over all workers, for each shard that this rank pushes; wait for them."""
        if not self._first:
            return []
        began = time.perf_counter()
        self._accumulated.wait()  # raises where a server refused the sums, which would then never be complete
        squares = self._wait(self._servers.squares(number, [shard.name for shard in self._first]))
        self._count_wait(time.perf_counter() - began)
        return [(shard.param, squares[shard.name]) for shard in self._first]

    def apply(self, number: int, scale: float | None, clip_value: float | None = None) -> Pull:
        """Start one update by the sums, and the pull of its results, except tables that steps pull by rows.

        Args:
            number: the number of the step.
            scale: the factor of the sums; None: the sums are dropped without an update.
            clip_value: the largest absolute value of an element after that; None does not clip.
        """
        assert self._optimizer is not None
        shards = [shard for shard in self.shards if shard.name not in self._by_rows]
        values = [shard.local() if shard.local().device.type == "cpu" else shard.host_memory() for shard in shards]
        into = {shard.name: value for shard, value in zip(shards, values, strict=True) if shard.is_first}
        factors = {"scale": 0.0 if scale is None else scale, "clip_value": clip_value}
        options_of = self._optimizer.options_of(self._first, **factors)
        apply = partial(self._servers.apply, number, options_of=options_of, found_inf=scale is None)
        # servers answer later pulls of rows after this update
        self._applied = apply([shard.name for shard in self._first if shard.name not in into])
        return self._make_pull(apply(list(into), into=into), shards, values, into)

    # -- pushing ----------------------------------------------------------------------------------------------

    def push_gradients(self) -> None:
        """Push the gradients, which are divided and clipped already, to the optimizer at the servers."""
        assert self._optimizer is not None
        gradients = gradients_of(self._first)
        self._push(gradients, "gradient", self._optimizer.options_of(self._first))

    def add(self, values: Sequence[Tensor]) -> None:
        """Add values, one for each parameter, to those at the servers."""
        value_of = {id(param): value for param, value in zip(self._params, values, strict=True)}
        reads = {shard.name: HostRead(shard.local(value_of[id(shard.param)])) for shard in self._first}
        self._push({name: read.wait() for name, read in reads.items()}, "add", {})

    def _push(self, values: Mapping[str, Gradient], rule: str, options_of: Mapping[str, Mapping[str, Any]]) -> None:
        self.wait_for_pushes()
        self._count_pushed(values)
        self._pushes.append(self._servers.push(values, rule, options_of=options_of))

    def wait_for_pushes(self) -> None:
        """Wait until the servers have applied all pushes of this rank."""
        began = time.perf_counter()
        while self._pushes:
            staleness = self._pushes.pop(0).wait().values()
            if numbers := [number for number in staleness if number is not None]:
                self._staleness.append(max(numbers))
        self._count_wait(time.perf_counter() - began)

    # -- clocks -----------------------------------------------------------------------------------------------

    def finish_step(self, step: int) -> None:
        """Advance this rank's clock after step ``step`` (from 0), once its pushes were applied."""
        if self._options.max_staleness is not None:
            self.wait_for_pushes()
            self._clock = self._servers.clock(step + 1, self._options.max_staleness)

    def wait_for_slowest(self) -> None:
        """Wait until the slowest worker is no more than ``max_staleness`` steps behind."""
        if self._clock is not None:
            began = time.perf_counter()
            self._wait(self._clock)
            self._clock = None
            self._count_wait(time.perf_counter() - began)

    # -- state ------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Mapping[str, Any]]:
        """Return the optimizer's state of this rank's parameters, here or at the servers, in the form of torch's."""
        if self._optimizer is None or not self.is_placed:
            return optimizer.state
        self.wait_for_pushes()
        return self._optimizer.state(self._servers, self.shards)

    # -- besides ----------------------------------------------------------------------------------------------

    def _count_wait(self, seconds: float) -> None:
        self._numbers["server_wait_seconds"] += seconds

    def _count_pushed(self, values: Mapping[str, Gradient]) -> None:
        for value in values.values():
            arrays = (value.ids, value.rows) if isinstance(value, RowGradient) else (value,)
            self._numbers["push_bytes"] += sum(array.nbytes for array in arrays if array is not None)

    def report(self) -> dict[str, float]:
        """Return numbers for the metrics of a step."""
        numbers = {name: self._numbers[name] for name in ("push_bytes", "pull_bytes", "server_wait_seconds")}
        if stale := self._staleness:
            numbers |= {"staleness": sum(stale) / len(stale), "staleness_max": float(max(stale))}
        self._numbers.clear()
        self._staleness.clear()
        return numbers

    def close(self) -> None:
        self._connection.close()
