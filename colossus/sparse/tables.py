"""The tables of a model: which they are, and what a step does with all of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.axes import gradient_sum_axes
from colossus.gradients.buckets import LocalSum
from colossus.gradients.hosts import Hosts
from colossus.layers import Embedding, EmbeddingBag, SampledSoftmax
from colossus.layout.parameter import ParameterSpec, StoredSpec, attach, spec_of
from colossus.layout.split_parameter import OWNED, hide_values
from colossus.rows.row_source import give_row_source
from colossus.rows.rules import Features
from colossus.sparse.levels import levels_over
from colossus.sparse.placement import PARTS_PER_OWNER, Placement
from colossus.sparse.plain_modules import look_up_in_rows
from colossus.sparse.row_exchange import RowExchange
from colossus.sparse.row_update import row_rule
from colossus.sparse.table import Table
from colossus.sparse.ways.dense import Dense
from colossus.sparse.ways.gather import Gather
from colossus.sparse.ways.owners import Owners
from colossus.sparse.ways.table_sync import TableSync

#: what looks up rows, if it has sparse=True -> in which of its parameters; others, of a subclass, are as any other
_LOOKUPS: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("weight",),
    EmbeddingBag: ("weight",),
    SampledSoftmax: ("weight", "bias"),
    nn.Embedding: ("weight",),
    nn.EmbeddingBag: ("weight",),
}


def table_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Name, module and parameter of what looks up in a table with a sparse gradient that training changes."""
    for name, module in model.named_modules():
        leaves = next((leaves for kind, leaves in _LOOKUPS.items() if isinstance(module, kind)), ())
        if leaves and module.sparse:
            for leaf in leaves:
                table = getattr(module, leaf, None)
                if isinstance(table, nn.Parameter) and table.requires_grad:
                    yield name, module, table


class Tables:
    """Of a rank's part of a model.

    Made in two steps: while the model has no values yet, which parameters are tables and how they are stored; and
    once it has, what looks up in them.

    Args:
        model: of this rank, on the meta device.
        way_of: (full name, full shape, ranks that share a table) -> name of its way.
        within: the axes over which gradients are summed at most; None: all.
    """

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        way_of: Callable[[str, tuple[int, ...], int], str],
        within: Container[str] | None = None,
    ) -> None:
        self._context = context
        #: by full name: the way, and the axes over which the gradient is a partial sum
        self._plans: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._tables: dict[int, Table] = {}
        #: by the axes over which the owners of tables are
        self._exchanges: dict[tuple[str, ...], RowExchange] = {}
        for _, _, weight in table_modules(model):
            spec = spec_of(weight)
            if spec.name in self._plans:
                continue
            axes = gradient_sum_axes(weight, context)
            axes = axes if within is None else tuple(axis for axis in axes if axis in within)
            way = way_of(spec.name, spec.shards[0].shape, context.size(axes))
            self._plans[spec.name] = way, axes
            if way == "owners" and axes:
                attach(weight, StoredSpec(spec, axes, context.grid.sizes))
            if (precision := context.precision).params != precision.optimizer:
                # it is updated where it is stored: no wide copy stands behind it
                spec_of(weight).computed_dtype = precision.params

    def __bool__(self) -> bool:
        return bool(self._plans)

    def __iter__(self) -> Iterator[Table]:
        return iter(self._tables.values())

    def of(self, param: nn.Parameter) -> Table | None:
        return self._tables.get(id(param))

    def connect(self, model: nn.Module, hosts: Hosts | None = None, partitions: int | None = None) -> None:
        """The model has its values: lookups go through the tables from now on.

        Args:
            hosts: rows are added up inside of these before they leave them; None: nowhere.
            partitions: into how many parts the rows of an owned table are cut.
        """
        self._hosts, self._partitions = hosts, partitions
        for _, module, weight in table_modules(model):
            spec = spec_of(weight)
            if id(weight) not in self._tables:
                way = self._way(weight, spec, *self._plans[spec.name])
                table = Table(weight, way, self._context, self._features(spec))
                self._tables[id(weight)] = table
                give_row_source(weight, table)
                if isinstance(way, Owners):
                    hide_values(weight, OWNED)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                look_up_in_rows(module)

    def _way(self, weight: nn.Parameter, spec: ParameterSpec, way: str, axes: tuple[str, ...]) -> TableSync:
        num_rows = spec.shards[0].shape[0]
        ranks = self._context.size(axes)
        if ranks == 1:
            return TableSync(weight, num_rows)
        levels = levels_over(self._context, axes, self._hosts)
        groups = [level.group for level in levels]
        if way == "dense":
            return Dense(weight, num_rows, groups if len(groups) > 1 else [self._context.group(axes)])
        if way == "gather":
            return Gather(weight, num_rows, groups)
        if axes not in self._exchanges:
            self._exchanges[axes] = RowExchange(levels, self._context.rank, self._context.device)
        placement = Placement.equal(num_rows, ranks, self._partitions or PARTS_PER_OWNER * ranks)
        return Owners(weight, spec.name, placement, self._exchanges[axes])

    def owned(self) -> list[tuple[Owners, AxisGroup]]:
        """The tables whose rows have owners, and these."""
        ways = [table.way for table in self if isinstance(table.way, Owners)]
        return [(way, self._context.group(self._plans[way.name][1])) for way in ways]

    def _features(self, spec: ParameterSpec) -> Features | None:
        """Where ranks have parts of the features of a table."""
        (shard,) = spec.shards
        group = self._context.group(spec.layout.dims[1])
        if group.size == 1:
            return None
        return Features(shard.shape[1], lambda own: collectives.all_reduce(own.contiguous(), group).wait())

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        for table in self:
            table.begin_step()

    def start_sums(self, params: Iterable[nn.Parameter]) -> None:
        """The gradients of those of these parameters that are tables are complete on this rank. Collective: all ranks
        that share tables have them in the same order."""
        for param in params:
            if (table := self.of(param)) is not None:
                table.start_sum()

    def finish_sums(self) -> None:
        """Let ``param.grad`` of each table be the sum over ranks of the rows that this one stores, as coalesced COO;
        None where no rank has used it."""
        for table in self:
            table.finish_sum()

    def serve(self) -> None:
        """Give other ranks the rows that they look up until all have come here. Collective."""
        for exchange in self._exchanges.values():
            exchange.serve()

    @contextmanager
    def forwards(self) -> Iterator[None]:
        """Around forwards without a step, of which ranks may have unequal numbers, or none. Collective.

        Rows that one forward has fetched the next one finds.
        """
        for table in self:
            table.way.begin()
        try:
            yield
            self.serve()
        finally:
            for table in self:
                table.way.end()

    def local_sums(self) -> list[LocalSum]:
        """Of what each rank put into the last sums: see `Strategy.local_sums`."""
        return [((table.name,), table.own_sum) for table in self if table.own_sum is not None]

    @contextmanager
    def updated(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Update the rows that the step has touched; inside, the optimizer finds no gradient of tables."""
        group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        gradients = [(table, table.param.grad) for table in self]
        for table, gradient in gradients:
            table.param.grad = None
            group = group_of.get(id(table.param))
            if gradient is None or group is None:
                continue
            rule = row_rule(optimizer, group)
            assert rule is not None, "checked when the optimizer was made"
            ids, rows = gradient._indices()[0], gradient._values()
            rule.update(table.param.detach(), optimizer.state[table.param], ids, rows, group, table.features)
        yield
        for table, gradient in gradients:
            table.param.grad = gradient
