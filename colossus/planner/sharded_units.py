"""The parameters of a pipeline rank that ZeRO cuts into rows, and the units that it gathers together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from colossus.planner.parameter_facts import ROOT, ModelFacts, ParameterFacts, ParameterKind
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.rank_stages import RankStages


@dataclass(frozen=True)
class StoredParameter:
    """A parameter that a rank trains, as the rank stores it.

    Attributes:
        facts: facts of the parameter.
        shape, elements: shape and number of the stored elements.
        dtype: name of the stored dtype.
        rows: axes over which its rows are cut.
    """

    facts: ParameterFacts
    shape: tuple[int, ...]
    elements: int
    dtype: str
    rows: tuple[str, ...]


@dataclass(frozen=True)
class ShardedUnits:
    """The parameters of a rank.

    Attributes:
        axes: axes of the plan.
        blocks: block in the chain (0 if the model is no chain) and parameters of each unit.
        root: parameters that ZeRO cuts and that belong to no unit, or to several.
        whole: parameters that are stored whole.
        every: all parameters, in the order of the model.
    """

    axes: PlanAxes
    blocks: Sequence[tuple[int, Sequence[ParameterFacts]]]
    root: Sequence[ParameterFacts]
    whole: Sequence[ParameterFacts]
    every: Sequence[ParameterFacts]

    @cached_property
    def cut(self) -> list[ParameterFacts]:
        """Return the parameters that ZeRO cuts into rows."""
        return [param for _, of_block in self.blocks for param in of_block] + [*self.root]

    @cached_property
    def kinds(self) -> list[tuple[ParameterFacts, bool, int]]:
        """Return a parameter of each kind, whether ZeRO cuts it, and the number of such parameters."""
        numbers: dict[tuple[int, bool], list[ParameterFacts]] = {}
        for is_cut, params in ((False, self.whole), (True, self.cut)):
            for param in params:
                numbers.setdefault((id(param.kind), is_cut), []).append(param)
        return [(params[0], is_cut, len(params)) for (_, is_cut), params in numbers.items()]

    @cached_property
    def stored(self) -> list[StoredParameter]:
        """Return the trained parameters of a rank as its optimizer has them, in the order of the model."""
        cut = {param.name for param in self.cut}
        return [self.as_stored(param, param.name in cut) for param in self.every if param.kind.is_trainable]

    def as_stored(self, param: ParameterFacts, is_cut: bool) -> StoredParameter:
        """Return a parameter as the rank stores it: whole, or its rows."""
        kind = param.kind
        if not is_cut:
            return StoredParameter(param, kind.shape, kind.elements, kind.dtype, ())
        rows = self.axes.rows_of(kind.cut_axes)
        number = rows_per_rank(kind, self.axes.size(rows))
        return StoredParameter(param, (number, *kind.shape[1:]), number * kind.row, kind.sharded[3], rows)


def sharded_units(model: ModelFacts, axes: PlanAxes, stages: RankStages) -> ShardedUnits:
    """Return the units of a rank, as `colossus.data_parallel.zero.blocks.by_block` makes them there."""
    own = [block for stage in stages.stages for block in stages.blocks_of(stage)]
    #: block of each unit
    place: dict[int, int] = {}
    if model.is_chain:
        for block in own:
            if (unit := model.units[block]) is not None:
                place.setdefault(unit, block)
    else:
        place = dict.fromkeys(range(model.num_units), 0)
    of_unit: dict[int, list[ParameterFacts]] = {unit: [] for unit in place}
    root: list[ParameterFacts] = []
    whole: list[ParameterFacts] = []
    every = parameters_on(model, stages)
    for param in every:
        if not axes.stage or not param.kind.has_rows or not (axes.stage == 3 or param.kind.is_trainable):
            whole.append(param)
        elif len(param.units) == 1 and param.units[0] in place:
            of_unit[param.units[0]].append(param)
        else:
            users = {unit if unit in place else ROOT for unit in param.units}
            (of_unit[users.pop()] if len(users) == 1 and ROOT not in users else root).append(param)
    return ShardedUnits(axes, [(place[unit], params) for unit, params in of_unit.items() if params], root, whole, every)


def parameters_on(model: ModelFacts, stages: RankStages) -> list[ParameterFacts]:
    """Return the parameters of a pipeline rank, in the order of the model."""
    own = (model.of_block[block] for stage in stages.stages for block in stages.blocks_of(stage))
    return [model.parameters[number] for number in sorted(frozenset().union(*own))]


def rows_per_rank(kind: ParameterKind, ranks: int) -> int:
    """Return the rows that each of ``ranks`` ranks stores, padding included."""
    return sum(-(-rows // ranks) for rows in kind.rows)
