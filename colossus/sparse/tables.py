"""The tables of a model with sparse gradients, and the calls of a step to all of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.bucket_sum import Hosts
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers import Embedding, EmbeddingBag, SampledSoftmax
from colossus.layout.parameter import ParameterSpec, StoredSpec, attach, spec_of
from colossus.layout.split_parameter import OWNED, hide_values
from colossus.rows.row_gradient import set_row_source
from colossus.rows.row_rules import Features
from colossus.sparse.choice import Survey, TableFacts
from colossus.sparse.owners import Level, Owners, Placement, RowExchange
from colossus.sparse.plain_modules import look_up_in_rows
from colossus.sparse.table import Dense, Gather, Table, TableSync
from colossus.sparse.table_optimizers import row_rule

#: module that looks up rows if it has sparse=True -> its tables; further parameters of a subclass are ordinary ones
_LOOKUPS: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("weight",),
    EmbeddingBag: ("weight",),
    SampledSoftmax: ("weight", "bias"),
    nn.Embedding: ("weight",),
    nn.EmbeddingBag: ("weight",),
}


def table_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield name, module and parameter of each module that looks up in a trainable table with a sparse gradient."""
    for name, module in model.named_modules():
        leaves = next((leaves for kind, leaves in _LOOKUPS.items() if isinstance(module, kind)), ())
        if leaves and module.sparse:
            for leaf in leaves:
                table = getattr(module, leaf, None)
                if isinstance(table, nn.Parameter) and table.requires_grad:
                    yield name, module, table


def survey(model: nn.Module, context: ParallelContext) -> Survey:
    """Return the tables of a whole model on the meta device, as this rank computes with them.

    A table that another module also computes with becomes dense in all of its lookups, since its gradient is of every
    row.

    Raises:
        ValueError: a module of torch has ``max_norm`` or ``scale_grad_by_freq``.
    """
    lookups: dict[int, list[nn.Parameter]] = {}
    for name, module, table in table_modules(model):
        if getattr(module, "max_norm", None) is not None or getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has sparse=True with max_norm or scale_grad_by_freq, "
                f"whose results would depend on the plan: leave them out, or sparse"
            )
        lookups.setdefault(id(module), []).append(table)
    tables = {id(table): table for parameters in lookups.values() for table in parameters}
    tied: dict[int, str] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            if id(param) in tables and id(module) not in lookups:
                tied.setdefault(id(param), f"{name or 'the model'} ({type(module).__name__})")
    facts = []
    for weight in tables.values():
        spec, axes = spec_of(weight), gradient_sum_axes(weight, context)
        ranks = context.size(axes)
        shape, local_shape, precision = spec.shards[0].shape, tuple(weight.shape), context.precision
        # rows and their gradients have the dtype of the optimizer; a tied table has those of other weights
        is_tied = id(weight) in tied
        itemsize = (precision.reduce_dtype(precision.gradients) if is_tied else precision.optimizer).itemsize
        facts.append(TableFacts(spec.name, shape, local_shape, itemsize, ranks, tied.get(id(weight))))
    for module in model.modules():
        if any(id(table) in tied for table in lookups.get(id(module), ())):
            module.sparse = False  # type: ignore[assignment]
    return Survey(tuple(facts))


class Tables:
    """The tables of a rank's part of a model.

    The constructor decides which parameters are tables and how they are stored, before the model has values. `connect`
    lets lookups go through them once it has.

    Args:
        model: this rank's part of the model, on the meta device.
        context: the ranks.
        way_of: a function of (full name, full shape, ranks that share a table) that returns the name of its way.
        within: the axes over which gradients may be summed; None: all.
        partitions: the number of parts into which the rows of an owned table are cut; None: one for each owner.
    """

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        way_of: Callable[[str, tuple[int, ...], int], str],
        within: Container[str] | None = None,
        partitions: int | None = None,
    ) -> None:
        self._context, self._partitions = context, partitions
        #: full name -> the way, and the axes over which the gradient is a partial sum
        self._plans: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._tables: dict[int, Table] = {}
        #: axes of the owners -> their exchange
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
                stored = StoredSpec(spec, axes, context.grid.sizes)
                placement = Placement.of(spec.shards[0].shape[0], context.size(axes), partitions)
                stored.place(placement.intervals(context.index(axes)))
                attach(weight, stored)
            if (precision := context.precision).params != precision.optimizer:
                # the stored table itself is updated: the optimizer has no wide copy of it
                spec_of(weight).computed_dtype = precision.params

    def __bool__(self) -> bool:
        return bool(self._plans)

    def __iter__(self) -> Iterator[Table]:
        return iter(self._tables.values())

    def of(self, param: nn.Parameter) -> Table | None:
        return self._tables.get(id(param))

    def connect(self, model: nn.Module, hosts: Hosts | None = None) -> None:
        """Let lookups go through the tables, once the model has its values.

        Args:
            model: this rank's part of the model.
            hosts: the hosts inside which gradients of rows are summed before they leave; None: they are not.
        """
        self._hosts = hosts
        for _, module, weight in table_modules(model):
            spec = spec_of(weight)
            if id(weight) not in self._tables:
                way = self._way(weight, spec, *self._plans[spec.name])
                table = Table(weight, way, self._features(spec))
                self._tables[id(weight)] = table
                set_row_source(weight, table)
                if isinstance(way, Owners):
                    hide_values(weight, OWNED)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                look_up_in_rows(module)

    def _way(self, weight: nn.Parameter, spec: ParameterSpec, way: str, axes: tuple[str, ...]) -> TableSync:
        num_rows = spec.shards[0].shape[0]
        ranks = self._context.size(axes)
        if ranks == 1:
            return TableSync(weight, num_rows)
        if way == "gather":
            return Gather(weight, num_rows, _own_group(self._context, axes))
        levels = _levels_over(self._context, axes, self._hosts)
        if way == "dense":
            groups = [level.group for level in levels]
            return Dense(weight, num_rows, groups if len(groups) > 1 else [self._context.group(axes)])
        if axes not in self._exchanges:
            self._exchanges[axes] = RowExchange(levels, self._context.rank, self._context.device)
        return Owners(weight, spec.name, Placement.of(num_rows, ranks, self._partitions), self._exchanges[axes])

    def _features(self, spec: ParameterSpec) -> Features | None:
        """Return the features of a table that are split over ranks, or None where they are not."""
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
        """Start the sums of those of these parameters that are tables, whose gradients are complete on this rank.

        Collective: all ranks that share tables pass them in the same order.
        """
        for param in params:
            if (table := self.of(param)) is not None:
                table.start_sum()

    def finish_sums(self) -> None:
        """Set ``param.grad`` of each table to the sum over ranks of this rank's rows (see `Table.finish_sum`)."""
        for table in self:
            table.finish_sum()

    def drain(self) -> None:
        """Answer the fetches of other ranks until all have come here. Collective."""
        for exchange in self._exchanges.values():
            exchange.drain()

    @contextmanager
    def forwards(self) -> Iterator[None]:
        """Run forwards without a step inside; ranks may have different numbers of them, or none. Collective.

        A forward may use rows that an earlier one fetched.
        """
        for table in self:
            table.way.begin()
        try:
            yield
            self.drain()
        finally:
            for table in self:
                table.way.end()

    def report(self) -> dict[str, float]:
        """Return the number of rows that this rank touched in the last step, and its fraction of each table's rows."""
        tables = list(self)
        alphas = {f"alpha.{table.name}": table.num_touched / max(1, table.num_rows) for table in tables}
        return {"rows_touched": float(sum(table.num_touched for table in tables)), **alphas} if tables else {}

    @contextmanager
    def updated(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Update the rows that have a gradient; inside, tables have no gradient for the optimizer."""
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


def _own_group(context: ParallelContext, axes: tuple[str, ...]) -> AxisGroup:
    """Return a group with connections of its own, so that rows do not wait for buckets of gradients."""
    everyone = context.group(axes)
    return context.subgroup(axes, range(everyone.size), str(everyone))


def _levels_over(context: ParallelContext, axes: tuple[str, ...], hosts: Hosts | None) -> list[Level]:
    """Return the levels from a rank to the owners of rows among the ranks over ``axes``.

    Without hosts there is one level. With hosts, gradients go first to the rank of this host that has the owner's
    position on its host, which adds them up (local aggregation in Parallax, 1808.02621), and from there to the owner.
    """
    everyone = context.group(axes)
    if hosts is None or everyone.size == 1 or not set(axes) & {*context.grid.axes("data")}:
        return [Level(_own_group(context, axes), tuple(range(everyone.size)))]
    members: dict[int, list[int]] = {}
    host_of, position_of = [], []
    for rank in everyone.ranks:
        host = hosts.host_of(context.grid.index(rank, "data"))
        host_of.append(host)
        position_of.append(len(members.setdefault(host, [])))
        members[host].append(rank)
    return [Level(hosts.inside(axes), tuple(position_of)), Level(hosts.between(), tuple(host_of))]
