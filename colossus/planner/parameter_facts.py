"""What is known of the parameters of a model under a layout, from which memory and traffic of any plan follow that has
this layout: any data size, ZeRO stage, partition and schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import Precision
from colossus.data_parallel.zero.blocks import by_block, modules_of_blocks
from colossus.data_parallel.zero.flat_rows import Dtypes
from colossus.engine.optimizers import holders_of
from colossus.engine.parameter_groups import ParameterGroups
from colossus.engine.routers import routers_of
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.pipeline_block import NamedBlock
from colossus.layout.parameter import ParameterSpec, spec_of
from colossus.planner.plan_axes import DATA
from colossus.rows.row_gradient import row_source
from colossus.schedule.bounds import Split, stage_bounds
from colossus.tensor_parallel.dtypes import gradient_dtype

#: the unit of what is gathered for a whole step
ROOT = -1


@dataclass(frozen=True)
class ParameterKind:
    """What parameters of equal blocks have in common: all but their names and places.

    Attributes:
        shape: on a rank, before anything is cut for storage.
        rows: of each logical parameter in it, in dim 0.
        dtype: as the model has it. Dtypes are by name, "float32".
        gradient: of its gradient, where it is stored whole.
        sharded: dtypes where rows of it are stored: (computed, gradient, reduced, stored), see
            `colossus.data_parallel.zero.flat_rows.Dtypes`.
        reduced: in which a whole gradient is summed over ranks.
        gradient_axes: over which its gradient is a sum; `DATA` stands for those of data.
        cut_axes: that cut it for compute.
        is_trainable: whether it gets a gradient.
        has_rows: whether rows of it may be stored: it has a dim, and no owners of its own.
        is_table: whether its rows stand for tokens or classes (`colossus.engine.optimizers.holders_of`).
        group: of the optimizer's groups, its number; 0 where there are none.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    dtype: str
    gradient: str
    sharded: tuple[str, str, str, str]
    reduced: str
    gradient_axes: frozenset[str]
    cut_axes: frozenset[str]
    is_trainable: bool
    has_rows: bool
    is_table: bool
    group: int

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def row(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class ParameterFacts:
    """Of one parameter; a tied one is one.

    Attributes:
        name: its first full name.
        kind: one object for all equal ones of a model.
        blocks: of the chain, those that use it, ascending; of a model that is no chain, (0,).
        units: numbers of the modules that hold it and are gathered as one (`ModelFacts.units`), `ROOT` for a place
            outside of these.
        spec: what it stands for.
    """

    name: str
    kind: ParameterKind
    blocks: tuple[int, ...]
    units: tuple[int, ...]
    spec: ParameterSpec = field(compare=False, repr=False)


@dataclass(frozen=True)
class ModelFacts:
    """Of a model under a layout.

    Attributes:
        parameters: in the order of the model.
        blocks: names of those of the chain; one of a model that is no chain.
        units: of each block of the chain the number of the module that it is, whose parameters ZeRO gathers together;
            None where a block is no single module, and of a model that is no chain.
        num_units: how many such modules there are, also in a model that is no chain.
        is_chain: whether the model is a chain of blocks.
        buffers: bytes of each buffer, and the blocks that own it; no blocks: all ranks have it.
        routers: number of experts of each.
        precision: of the run.
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
        """Numbers of the parameters that each block uses."""
        found: list[set[int]] = [set() for _ in self.blocks]
        for number, one in enumerate(self.parameters):
            for block in one.blocks:
                found[block].add(number)
        return tuple(map(frozenset, found))

    @cached_property
    def first_trained(self) -> int:
        """The first block that has a parameter to train: those before it have no backward."""
        return min((min(one.blocks) for one in self.parameters if one.kind.is_trainable and one.blocks), default=0)

    def bounds(self, split: Split, num_stages: int) -> tuple[int, ...]:
        """Stage s runs the blocks bounds[s] to bounds[s + 1]: as `colossus.schedule.partition.make_partition` has it.

        Raises:
            ValueError: for a model that is no chain, and a split that does not fit.
        """
        if num_stages == 1:
            return (0, len(self.blocks))
        if not self.is_chain:
            raise ValueError(f"a model that is no chain of blocks cannot be cut into {num_stages} stages")
        return stage_bounds(split, self.blocks, self._elements, num_stages)

    @cached_property
    def _elements(self) -> list[int]:
        """Of each block, of whole parameters."""
        elements = [0] * len(self.blocks)
        for one in self.parameters:
            for block in one.blocks:
                elements[block] += one.spec.num_elements
        return elements

    def reduced(self, gradient: str) -> str:
        """In which gradients of a dtype are summed over ranks."""
        return dtype_name(self.precision.reduce_dtype(getattr(torch, gradient)))


def facts_of(
    model: nn.Module,
    context: ParallelContext,
    chain: Sequence[NamedBlock] | None,
    groups: ParameterGroups | None = None,
) -> ModelFacts:
    """The facts of a whole model, once a forward has run: layers record the axes of gradients in their first.

    Args:
        model: of meta or fake tensors of the run's dtypes (`colossus.planner.fake_rank.give_sizes`).
        chain: its blocks; None of a model that is no chain.
        groups: of the optimizer, where the config has rules for them.
    """
    modules = modules_of_blocks(model, chain)
    number_of = {id(module): number for number, module in enumerate(modules)}
    of_blocks, root = by_block(model, chain)
    held = {id(one.param): one for block in (*(params for _, params in of_blocks), root) for one in block}
    units_of = _units_of(modules)
    tables = holders_of(model, context, ()).tables
    users = _users([] if chain is None else [block.parameters for block in chain])
    kinds: dict[ParameterKind, ParameterKind] = {}
    found = []
    for name, param in model.named_parameters():
        one = held.get(id(param))
        spec = spec_of(param)
        dtypes = Dtypes.of(param, context.precision, is_product=one is not None and one.is_product)
        gradient = gradient_dtype(param)
        made = ParameterKind(
            tuple(param.shape),
            tuple(stop - start for start, stop in (shard.rows for shard in spec.shards)),
            dtype_name(param.dtype),
            dtype_name(gradient),
            (
                dtype_name(dtypes.computed),
                dtype_name(dtypes.gradient),
                dtype_name(dtypes.reduced),
                dtype_name(dtypes.stored),
            ),
            dtype_name(context.precision.reduce_dtype(gradient)),
            _gradient_axes(spec, context),
            frozenset(axis for axis in spec.layout.shard_axes if context.grid.sizes[axis] > 1),
            param.requires_grad,
            one is not None and row_source(param) is None,
            id(param) in tables,
            0 if groups is None else groups.group_of.get(name, 0),
        )
        places = () if one is None else one.places
        at = {unit for module, _ in places for unit in units_of.get(id(module), {ROOT})}
        blocks = (0,) if chain is None else users.get(name, ())
        found.append(ParameterFacts(name, kinds.setdefault(made, made), blocks, tuple(sorted(at)), spec))
    known = dict(model.named_modules())
    units = (
        (None,)
        if chain is None
        else tuple(number_of.get(id(known.get(block.modules[0] if block.modules else ""))) for block in chain)
    )
    return ModelFacts(
        tuple(found),
        ("",) if chain is None else tuple(block.name for block in chain),
        units,
        len(modules),
        chain is not None,
        _buffers(model, chain),
        tuple(routers_of(model).values()),
        context.precision,
    )


def _units_of(modules: Sequence[nn.Module]) -> dict[int, set[int]]:
    """Id of a module -> the units that it is in."""
    found: dict[int, set[int]] = {}
    for number, module in enumerate(modules):
        for inner in module.modules():
            found.setdefault(id(inner), set()).add(number)
    return found


def _users(names: Sequence[Iterable[str]]) -> dict[str, tuple[int, ...]]:
    """Name -> the blocks that own it, ascending."""
    found: dict[str, tuple[int, ...]] = {}
    for number, of_block in enumerate(names):
        for name in of_block:
            found[name] = (*found.get(name, ()), number)
    return found


def _gradient_axes(spec: ParameterSpec, context: ParallelContext) -> frozenset[str]:
    """As layers have recorded them. Where the layout's world has one data rank they record nothing of data, over which
    samples are split under any other plan."""
    recorded = spec.gradient_axes
    axes = recorded if recorded is not None else model_parallel_of(context).regions.whole.shard_axes
    grid = context.grid
    data = {axis for axis in grid.axes("data") if axis not in grid.expert_axes}
    others = {axis for axis in axes if axis not in data and grid.sizes[axis] > 1}
    is_over_data = bool(data & set(axes)) or all(grid.sizes[axis] == 1 for axis in data)
    return frozenset(others | ({DATA} if is_over_data else set()))


def _buffers(model: nn.Module, chain: Sequence[NamedBlock] | None) -> tuple[tuple[int, tuple[int, ...]], ...]:
    users = _users([] if chain is None else [block.buffers for block in chain])
    return tuple((buffer.nbytes, users.get(name, ())) for name, buffer in model.named_buffers())


def dtype_name(dtype: torch.dtype) -> str:
    """By what facts know a dtype: float32."""
    return str(dtype).removeprefix("torch.")


def itemsize(dtype: str) -> int:
    """Bytes of an element of a dtype by its name."""
    return _ITEMSIZES[dtype]


_ITEMSIZES: Mapping[str, int] = {
    name: getattr(torch, name).itemsize
    for name in ("float64", "float32", "bfloat16", "float16", "complex64", "complex128", "int64", "int32", "int16",
                 "int8", "uint8", "bool")
}  # fmt: skip
