"""The parameters of a pipeline rank of a plan, as it stores them: whole, or the rows that ZeRO gives it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from colossus.config import Config
from colossus.context.grid import RankGrid, build_grid
from colossus.data_parallel.zero.blocks import ROOT, in_buckets, only_block
from colossus.data_parallel.zero.row_forms import axes_of_zero, stage_in_effect
from colossus.gradients.buckets import GradientForm
from colossus.planner.parameter_facts import DATA, ModelFacts, ParameterFacts, ParameterKind
from colossus.planner.plan_stages import RankStages
from colossus.registry import STRATEGIES


class PlanAxes:
    """The axes of a plan over which gradients are summed, and rows are cut.

    Attributes:
        grid: grid of the plan.
        summed: axes over which values of a step are summed: all, without data if the strategy is not exact.
        rows: axes with more than one rank over which ZeRO cuts rows.
        stage: effective stage of ZeRO; 0 if the stored parameters are those that compute sees.
    """

    def __init__(self, config: Config) -> None:
        zero, precision = config.parallel.zero, config.train.precision
        self.grid: RankGrid = build_grid(config.parallel)
        data = self.grid.axes("data")
        self._expanded = tuple(axis for axis in data if axis not in self.grid.expert_axes)
        is_exact = STRATEGIES.build(config.parallel.data_strategy).exact
        self.summed = tuple(axis for axis in self.grid.names if is_exact or axis not in data)
        self.rows = self._split(axes_of_zero(self.grid)) if zero.stage else ()
        is_copied = precision.params != precision.optimizer or bool(zero.stage and zero.offload)
        self.stage = stage_in_effect(zero.stage or 3, self.size(self.rows), is_copied=is_copied)

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.grid.sizes[axis] for axis in axes)

    def name(self, axes: Iterable[str]) -> str:
        """Return the name under which bytes over these axes are counted."""
        return "x".join(self._split(axes))

    def sums(self, axes: Iterable[str], stored: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the axes with more than one rank over which a gradient is all-reduced, in the order of the grid.

        Args:
            axes: axes of the layout over which the gradient is a sum.
            stored: axes over which its rows are cut, which a reduce-scatter sums.
        """
        wanted = {axis for name in axes for axis in (self._expanded if name == DATA else (name,))}
        return self._split(axis for axis in self.summed if axis in wanted.difference(stored))

    def _split(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.grid.sizes[axis] > 1)


@dataclass(frozen=True, eq=False)
class StoredKind:
    """Equal parameters as a rank stores them.

    Attributes:
        kind: facts of the parameters.
        is_cut: whether they are stored apart from those that compute sees: their rows, or all in the optimizer's dtype.
        rows: axes over which their rows are cut.
        shape, dtype: shape and dtype of what is stored.
        made: dtype of the gradient that backward makes.
        summed: the gradient that ranks all-reduce.
    """

    kind: ParameterKind
    is_cut: bool
    rows: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    made: torch.dtype
    summed: GradientForm

    @cached_property
    def elements(self) -> int:
        """Return the number of stored elements."""
        return math.prod(self.shape)


class RankParameters:
    """The parameters of a pipeline rank.

    Args:
        model: facts of the model.
        config: resolved config of a plan with the layout of ``model``.
        stages: the stages of the rank.

    Attributes:
        axes: axes of the plan.
        frees: whether the weights of blocks are freed within the step, and gathered again.
        parameters: the parameters as the rank stores them, in the order of the model.
        units: parameters that are gathered together, in the order in which the engine stores blocks: each unit with its
            block in the chain (0 if the model is no chain). Those of no unit, or of several, come first, with None.
    """

    def __init__(
        self,
        model: ModelFacts,
        config: Config,
        stages: RankStages,
    ) -> None:
        self.model, self.config, self.stages = model, config, stages
        self.axes = PlanAxes(config)
        self.frees = self.axes.stage == 3 and config.parallel.tensor.weights != "step"
        self._kinds: dict[tuple[int, bool], StoredKind] = {}
        self.parameters: list[tuple[ParameterFacts, StoredKind]] = []
        own = [block for stage in stages.stages for block in stages.blocks_of(stage)]
        #: block of each unit
        places: dict[int, int] = {} if model.is_chain else dict.fromkeys(range(model.num_units), 0)
        for block in own:
            if (unit := model.units[block]) is not None:
                places.setdefault(unit, block)
        of_unit: dict[int, list[ParameterFacts]] = {unit: [] for unit in places}
        root: list[ParameterFacts] = []
        for number in sorted(frozenset().union(*(model.of_block[block] for block in own))):
            param = model.parameters[number]
            is_cut = self._is_cut(param.kind)
            self.parameters.append((param, self._stored(param.kind, is_cut)))
            if is_cut:
                unit = only_block({unit if unit in places else ROOT for unit in param.units})
                (root if unit == ROOT else of_unit[unit]).append(param)
        blocks = [(places[unit], params) for unit, params in of_unit.items() if params]
        joined = in_buckets(
            blocks, lambda param: param.kind.form.elements * param.kind.dtype.itemsize, stays=not self.frees
        )
        self.units: list[tuple[int | None, Sequence[ParameterFacts]]] = [(None, root)] if root else []
        self.units += [(numbers[0], params) for numbers, params in joined]

    @cached_property
    def counts(self) -> list[tuple[ParameterFacts, StoredKind, int]]:
        """Return a parameter of each kind, and the number of such parameters."""
        counts = Counter(stored for _, stored in self.parameters)
        first = {stored: param for param, stored in reversed(self.parameters)}
        return [(first[stored], stored, count) for stored, count in counts.items()]

    def _is_cut(self, kind: ParameterKind) -> bool:
        return bool(self.axes.stage) and kind.has_rows and (self.axes.stage == 3 or kind.form.is_trainable)

    def _stored(self, kind: ParameterKind, is_cut: bool) -> StoredKind:
        key = id(kind), is_cut
        if key not in self._kinds:
            form, axes = kind.form, self.axes
            rows = form.axes_of_rows(axes.rows) if is_cut else ()
            shape = (form.rows_on(axes.size(rows)), *form.shape[1:]) if is_cut else form.shape
            summed = GradientForm(axes.sums(kind.gradient_axes), kind.gradient, form.elements)
            if is_cut and self.config.parallel.zero.stage:
                summed = GradientForm(axes.sums(kind.gradient_axes, rows), form.dtypes.stored, math.prod(shape))
            dtype, made = (form.dtypes.stored, form.dtypes.gradient) if is_cut else (kind.dtype, kind.gradient)
            self._kinds[key] = StoredKind(kind, is_cut, rows, shape, dtype, made, summed)
        return self._kinds[key]

    @cached_property
    def trained(self) -> list[tuple[ParameterFacts, StoredKind]]:
        """Return the parameters that get a gradient, in the order of the model."""
        return [(param, stored) for param, stored in self.parameters if param.kind.form.is_trainable]

    def stage_of(self, param: ParameterFacts) -> int:
        """Return the stage whose backward completes the gradient of a parameter."""
        if len(param.blocks) == 1:
            return self.stages.stage_of[param.blocks[0]]
        return self.stages.stages_with(param.blocks)[-1]

    def completed_in(self, param: ParameterFacts, stage: int) -> int:
        """Return the block of a stage whose backward completes the gradient of a parameter."""
        start, stop = self.stages.bounds[stage : stage + 2]
        for block in param.blocks:
            if start <= block < stop:
                return block
        return stop - 1
