"""Which parameters of a pipeline rank ZeRO stores by rows, and which of them are gathered together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colossus.planner.parameter_facts import ROOT, ModelFacts, ParameterFacts, ParameterKind
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.rank_stages import RankStages


@dataclass(frozen=True)
class ShardedUnits:
    """The parameters of a rank.

    Attributes:
        blocks: of each unit its block in the chain (of a model that is no chain, 0), and its parameters.
        root: those that belong to no unit, or to several.
        whole: those that are stored whole.
        every: all of them, in the order of the model.
    """

    blocks: Sequence[tuple[int, Sequence[ParameterFacts]]]
    root: Sequence[ParameterFacts]
    whole: Sequence[ParameterFacts]
    every: Sequence[ParameterFacts]

    @property
    def cut(self) -> list[ParameterFacts]:
        """Those of which rows are stored."""
        return [one for _, of_block in self.blocks for one in of_block] + [*self.root]


@dataclass(frozen=True)
class StoredParameter:
    """A parameter that a rank trains, as the rank stores it.

    Attributes:
        rows: the axes over which its rows are cut.
    """

    facts: ParameterFacts
    shape: tuple[int, ...]
    elements: int
    dtype: str
    rows: tuple[str, ...]


def sharded_units(model: ModelFacts, axes: PlanAxes, stages: RankStages) -> ShardedUnits:
    """As `colossus.data_parallel.zero.blocks.by_block` finds them on the rank."""
    own = [block for stage in stages.stages for block in stages.blocks_of(stage)]
    #: unit -> its block
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
    for one in every:
        if not axes.stage or not one.kind.has_rows or not (axes.stage == 3 or one.kind.is_trainable):
            whole.append(one)
        elif len(one.units) == 1 and one.units[0] in place:
            of_unit[one.units[0]].append(one)
        else:
            users = {unit if unit in place else ROOT for unit in one.units}
            (of_unit[users.pop()] if len(users) == 1 and ROOT not in users else root).append(one)
    return ShardedUnits([(place[unit], params) for unit, params in of_unit.items() if params], root, whole, every)


def parameters_on(model: ModelFacts, stages: RankStages) -> list[ParameterFacts]:
    """Those of a pipeline rank, in the order of the model."""
    own = (model.of_block[block] for stage in stages.stages for block in stages.blocks_of(stage))
    return [model.parameters[number] for number in sorted(frozenset().union(*own))]


def rows_per_rank(kind: ParameterKind, ranks: int) -> int:
    """Rows that each of so many ranks stores, padding included."""
    return sum(-(-rows // ranks) for rows in kind.rows)


def as_stored(units: ShardedUnits, axes: PlanAxes) -> list[StoredParameter]:
    """What the optimizer of a rank has, in the order of the model."""
    cut = {one.name for one in units.cut}
    found = []
    for one in units.every:
        kind = one.kind
        if not kind.is_trainable:
            continue
        if one.name not in cut:
            found.append(StoredParameter(one, kind.shape, kind.elements, kind.dtype, ()))
            continue
        rows = axes.rows_of(kind.cut_axes)
        number = rows_per_rank(kind, axes.size(rows))
        shape = (number, *kind.shape[1:])
        found.append(StoredParameter(one, shape, number * kind.row, kind.sharded[3], rows))
    return found
