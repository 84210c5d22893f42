"""Facts of a model's parameters under a layout.

Memory and traffic of any plan with this layout follow from them, for any data size, ZeRO stage, partition and schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import Precision
from colossus.data_parallel.zero.blocks import blocks_of_modules, modules_of_blocks, placed_parameters, users_of
from colossus.data_parallel.zero.row_forms import RowForm
from colossus.data_parallel.zero.sharded_block import PlacedParameter
from colossus.engine.optimizers import holders_of
from colossus.engine.parameter_groups import ParameterGroups
from colossus.engine.routers import routers_of
from colossus.gradients.gradient_axes import partial_axes
from colossus.layers.pipeline_block import NamedBlock
from colossus.layout.parameter import ParameterSpec, spec_of
from colossus.rows.row_gradient import row_source
from colossus.schedule.bounds import Split, stage_bounds
from colossus.tensor_parallel.dtypes import gradient_dtype

#: name for all data axes but the one that spreads experts: a layout does not know how a plan divides its data ranks
DATA = "data"


@dataclass(frozen=True)
class ParameterKind:
    """The facts that parameters of equal blocks share: all but their names and places.

    Attributes:
        form: shape on a rank before ZeRO cuts it for storage, and the dtypes if ZeRO does.
        dtype: dtype in the model.
        gradient: dtype of its gradient, if the parameter is stored whole.
        gradient_axes: axes over which its gradient is summed; `DATA` stands for the data axes.
        has_rows: whether ZeRO may cut it into rows: it has a dim, and no row owners of its own.
        is_table: whether its rows stand for tokens or classes (`colossus.engine.optimizers.holders_of`).
        group: number of its optimizer group, 0 without groups.
    """

    form: RowForm
    dtype: torch.dtype
    gradient: torch.dtype
    gradient_axes: frozenset[str]
    has_rows: bool
    is_table: bool
    group: int

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of its gradient, if the parameter is stored whole."""
        return self.form.elements * self.gradient.itemsize


@dataclass(frozen=True)
class ParameterFacts:
    """The facts of one parameter. A tied parameter is one.

    Attributes:
        name: its first full name.
        kind: facts that it shares; one object for all equal parameters of a model.
        blocks: blocks of the chain that use it, ascending; (0,) in a model that is no chain.
        units: numbers of the units that have it (`ModelFacts.units`), with `ROOT` if a module outside of them does.
        spec: its logical parameters and layout.
    """

    name: str
    kind: ParameterKind
    blocks: tuple[int, ...]
    units: tuple[int, ...]
    spec: ParameterSpec = field(compare=False, repr=False)


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model under a layout.

    A unit is a module whose parameters ZeRO gathers together.

    Attributes:
        parameters: facts of its parameters, in the order of the model.
        blocks: names of the blocks of the chain; a single one if the model is no chain.
        units: number of the unit that each block is; None if a block is no single module, or the model is no chain.
        num_units: number of units, also in a model that is no chain.
        is_chain: whether the model is a chain of blocks.
        buffers: bytes of each buffer, and the blocks that own it; without blocks, all ranks have it.
        routers: number of experts of each router.
        precision: dtypes of the run.
    """

    parameters: tuple[ParameterFacts, ...]
    blocks: tuple[str, ...]
    units: tuple[int | None, ...]
    num_units: int
    is_chain: bool
    buffers: tuple[tuple[int, tuple[int, ...]], ...]
    routers: tuple[int, ...]
    precision: Precision

    @cached_property
    def of_block(self) -> tuple[frozenset[int], ...]:
        """Return the numbers of the parameters that each block uses."""
        numbers: list[set[int]] = [set() for _ in self.blocks]
        for number, param in enumerate(self.parameters):
            for block in param.blocks:
                numbers[block].add(number)
        return tuple(map(frozenset, numbers))

    @cached_property
    def first_trained(self) -> int:
        """Return the first block with a trained parameter: the blocks before it have no backward."""
        return min(
            (min(param.blocks) for param in self.parameters if param.kind.form.is_trainable and param.blocks), default=0
        )

    def bounds(self, split: Split, num_stages: int) -> tuple[int, ...]:
        """Return the bounds of stages, as `colossus.schedule.partition.make_partition` cuts the model.

        Stage s runs the blocks from bounds[s] up to, but not including, bounds[s + 1].

        Raises:
            ValueError: the model is no chain, or the split does not fit it.
        """
        if num_stages == 1:
            return (0, len(self.blocks))
        if not self.is_chain:
            raise ValueError(f"a model that is no chain of blocks cannot be cut into {num_stages} stages")
        return stage_bounds(split, self.blocks, self._elements, num_stages)

    @cached_property
    def _elements(self) -> list[int]:
        """Return the elements of each block's parameters, over all ranks."""
        elements = [0] * len(self.blocks)
        for param in self.parameters:
            for block in param.blocks:
                elements[block] += param.spec.num_elements
        return elements


def facts_of(
    model: nn.Module,
    context: ParallelContext,
    blocks: Sequence[NamedBlock],
    groups: ParameterGroups | None = None,
    *,
    is_chain: bool,
) -> ModelFacts:
    """Return the facts of a model after a forward, in which layers record the axes of gradients.

    Args:
        model: the model, with meta or fake tensors of the run's dtypes (`colossus.planner.fake_rank.give_sizes`).
        context: context of the rank.
        blocks: blocks of the model; one if it is no chain.
        groups: groups of the optimizer, if the config has rules for them.
        is_chain: whether the model is a chain of blocks.
    """
    modules = modules_of_blocks(model, blocks if is_chain else None)
    number_of, units_of = {id(module): number for number, module in enumerate(modules)}, blocks_of_modules(modules)
    placed = {id(entry.param): entry for entry in placed_parameters(model)}
    tables = holders_of(model, context, ()).tables
    users, buffer_users = _users(block.parameters for block in blocks), _users(block.buffers for block in blocks)
    kinds: dict[ParameterKind, ParameterKind] = {}
    parameters = []
    for name, param in model.named_parameters():
        entry, spec = placed.get(id(param), PlacedParameter(param, ())), spec_of(param)
        kind = ParameterKind(
            RowForm.of(param, context.precision, is_product=entry.is_product),
            param.dtype,
            gradient_dtype(param),
            _gradient_axes(spec, context),
            bool(entry.places) and row_source(param) is None,
            id(param) in tables,
            0 if groups is None else groups.group_of.get(name, 0),
        )
        units = tuple(sorted(users_of(entry, units_of)))
        parameters.append(ParameterFacts(name, kinds.setdefault(kind, kind), users.get(name, ()), units, spec))
    by_name = dict(model.named_modules())
    firsts = [by_name.get(block.modules[0] if block.modules else "") for block in blocks]
    return ModelFacts(
        tuple(parameters),
        tuple(block.name for block in blocks),
        tuple(number_of.get(id(module)) for module in firsts),
        len(modules),
        is_chain,
        tuple((buffer.nbytes, buffer_users.get(name, ())) for name, buffer in model.named_buffers()),
        tuple(routers_of(model).values()),
        context.precision,
    )


def _users(names: Iterable[Iterable[str]]) -> dict[str, tuple[int, ...]]:
    """Return the blocks that own a parameter or buffer, ascending, by its name.

    Args:
        names: names in each block.
    """
    users: dict[str, tuple[int, ...]] = {}
    for number, block_names in enumerate(names):
        for name in block_names:
            users[name] = (*users.get(name, ()), number)
    return users


def _gradient_axes(spec: ParameterSpec, context: ParallelContext) -> frozenset[str]:
    """Return the axes over which a parameter's gradient is summed under any plan of the layout.

    Layers have recorded them. With one data rank they record no data axes, but other plans split samples over these.
    """
    axes, grid = partial_axes(spec, context), context.grid
    data = {axis for axis in grid.axes("data") if axis not in grid.expert_axes}
    others = {axis for axis in axes if axis not in data and grid.sizes[axis] > 1}
    is_over_data = bool(data & set(axes)) or all(grid.sizes[axis] == 1 for axis in data)
    return frozenset(others | ({DATA} if is_over_data else set()))
