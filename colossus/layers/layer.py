"""What every layer of this package shares: its context, the regions of its activations, and how it makes parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from colossus.construct import allocate
from colossus.construct.named_module import NamedModule
from colossus.context.parallel_context import ParallelContext, current_context
from colossus.layers.batch_info import BatchInfo, BatchScope
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout, gradient_axes
from colossus.layout.parameter import Initializer, LogicalShard, ParameterSpec, attach, local_rows, spec_of
from colossus.registry import TENSOR_MODES
from colossus.sequence_parallel.split import SequenceSplit
from colossus.tensor_parallel.choice import Shardings
from colossus.tensor_parallel.mode import Regions, TensorMode
from colossus.tensor_parallel.weight_store import WeightStore


@dataclass(frozen=True)
class ModelParallel:
    """The tensor mode of a context, with the regions and shardings it gives; axes of one rank are left out.

    Attributes:
        shardings: None without tensor parallelism.
        weights: fetches the weights of all layers.
        sequence: how tokens are split over the sequence axis; None where they are not.
        batch_scope: entered by the engine around each step; what layers read of it is ``batch_info``.
    """

    context: ParallelContext
    mode: type[TensorMode]
    regions: Regions
    shardings: Shardings | None
    weights: WeightStore
    sequence: SequenceSplit | None
    batch_scope: BatchScope = field(default_factory=BatchScope)

    @property
    def batch_info(self) -> BatchInfo:
        return self.batch_scope.info

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.context.grid.sizes

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelParallel:
        return self


_by_context: WeakKeyDictionary[ParallelContext, ModelParallel] = WeakKeyDictionary()


def model_parallel_of(context: ParallelContext) -> ModelParallel:
    """The plan of a context, made once."""
    held = _by_context.get(context)
    if held is None:
        held = _by_context[context] = _model_parallel(context)
    return held


def _model_parallel(context: ParallelContext) -> ModelParallel:
    mode: type[TensorMode] = TENSOR_MODES.get(context.tensor_mode)
    sizes = context.grid.sizes

    def live(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if sizes[axis] > 1)

    inputs = Activation(batch=live(context.grid.axes("data")), tokens=live(context.grid.axes("sequence")))
    weights = WeightStore(context.weight_scope, coalesce=context.coalesce)
    sequence = SequenceSplit(context) if context.size("sequence") > 1 else None
    if context.size("tensor") == 1:
        return ModelParallel(context, mode, Regions(inputs, inputs, inputs), None, weights, sequence)
    shardings = Shardings.of(mode, inputs, sizes, sequence_sharded=context.sequence_sharded, keep=context.keep_gathered)
    return ModelParallel(context, mode, shardings.regions, shardings, weights, sequence)


class Layer(NamedModule):
    """Base of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parallel = model_parallel_of(current_context())

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """A copy whose parameters keep their specs, which torch's copy of a parameter would drop."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, parameter in self._parameters.items():
            spec = spec_of(parameter) if parameter is not None else None
            other = copied._parameters[name]
            if spec is not None and other is not None:
                attach(other, spec)
        return copied

    @property
    def context(self) -> ParallelContext:
        return self.parallel.context

    @property
    def is_split(self) -> bool:
        """Whether there is any tensor parallelism to do."""
        return self.parallel.shardings is not None

    def make_parameter(
        self,
        shapes: Mapping[str, Sequence[int]],
        layout: Layout,
        init: Mapping[str, Initializer] | Initializer,
        *,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """A parameter holding the rank's part of one or more logical ones.

        Args:
            shapes: part name -> full shape; one part named "" when the parameter is not fused.
            layout: of every part.
            init: draws the initial values, for all parts or by part.
        """
        sizes = self.parallel.sizes
        full = [tuple(shape) for shape in shapes.values()]
        rows = local_rows(full, [layout] * len(full), sizes)
        pieces = tuple(
            LogicalShard(part, shape, layout, init[part] if isinstance(init, Mapping) else init, span)
            for part, shape, span in zip(shapes, full, rows, strict=True)
        )
        local = (rows[-1][1], *layout.chunk(full[0], sizes)[1:])
        spec = ParameterSpec(pieces, f"{type(self).__name__} parameter of shape {full if len(full) > 1 else full[0]}")
        return attach(nn.Parameter(allocate.allocate(local, spec, self.context, dtype)), spec)

    def decide_gradients(self, parameter: nn.Parameter | None, *uses: Activation) -> None:
        """Note, before any use, which activations this parameter meets: the same whenever it is used."""
        spec = spec_of(parameter) if parameter is not None else None
        if spec is not None:
            spec.record(gradient_axes(spec.layout, *uses))
            spec.is_decided = True

    def check_stored(self, weight: nn.Parameter, layout: Layout) -> None:
        """That a weight is stored as this layer reads it; one tied by assignment may be stored as another layer does.

        Raises:
            ValueError: when it is not: local shapes may agree where the values do not.
        """
        spec = spec_of(weight)
        if spec is None or spec.layout != layout:
            held = spec.layout if spec is not None else "whole"
            raise ValueError(
                f"{self.title}: its weight is stored as {held}, but this layer stores it as {layout}. A weight that "
                f"several layers share must be made by one: LMHead(hidden_size, vocab_size, tied_to=embedding) ties a "
                f"head to an embedding in every mode"
            )

    def record_uses(self, activation: Activation) -> None:
        """Note that this layer's own parameters meet an activation so laid out, element by element."""
        for parameter in self.parameters(recurse=False):
            spec = spec_of(parameter)
            if spec is not None:
                spec.record(gradient_axes(spec.layout, activation))

    @property
    def title(self) -> str:
        """How errors name this layer."""
        return f"{self.full_name} ({type(self).__name__})" if self.full_name else type(self).__name__
