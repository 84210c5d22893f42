"""The collectives of weights, gradients and a step's numbers that a pipeline rank starts in a step, and when.

What activations send is not here: nor is what tensor parallelism sends of weights (`colossus.tensor_parallel.traffic`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from colossus.config import Config
from colossus.data_parallel.options.exact_options import HierarchicalOptions
from colossus.layers.router import SUMS
from colossus.planner.bucket_traffic import BucketTraffic, Gradient, buckets_of, flat_sum, tied_sums, two_level_sum
from colossus.planner.collective import Collective
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts, ParameterKind
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.rank_stages import RankStages
from colossus.planner.sharded_units import ShardedUnits, as_stored, rows_per_rank, sharded_units
from colossus.planner.zero_traffic import Unit, ZeroTraffic, together
from colossus.schedule.actions import INPUT_GRADIENT, LAST_USE

#: of the step's numbers: loss, count, squares of gradients, requests to stop, marks of programs
_NUMBERS = 5
_FLOAT64 = 8


@dataclass(frozen=True)
class BlockGather:
    """The weights of a block that is freed within a step (ZeRO-3).

    Attributes:
        stage, block: that needs them; the gather starts while the block before it runs.
        in_backward: whether they are gathered again for each backward, as they are where each forward frees them.
    """

    stage: int
    block: int
    in_backward: bool
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Reduction:
    """Gradients that travel together.

    Attributes:
        stage, block: with whose backward the last of them is made; None: they wait until the stage is reduced.
        when: "each": in each backward of the stage (where a schedule splits them, behind its weights' half). "last": in
            its last one of the step.
        collectives: one after the other.
    """

    stage: int
    block: int | None
    when: Literal["each", "last"]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class StepTraffic:
    """Of one pipeline rank in a step.

    Attributes:
        begin: before the first forward: weights that are whole for all of the step.
        gathers: of blocks that are not, in the order of the chain.
        gathered: of these, (stage, microbatch) of each forward that finds them freed.
        reductions: of each stage in the order in which they start.
        end: behind the last backward and all reductions, one after the other.
    """

    begin: tuple[Collective, ...]
    gathers: tuple[BlockGather, ...]
    gathered: frozenset[tuple[int, int]]
    reductions: tuple[Reduction, ...]
    end: tuple[Collective, ...]

    def counts(self, stages: RankStages) -> Counter[Collective]:
        """How often each collective is started in a step."""
        forwards = Counter(stage for stage, _ in self.gathered)
        backwards = Counter(action.stage for action in stages.actions if action.kind in LAST_USE)
        found: Counter[Collective] = Counter((*self.begin, *self.end))
        for gather in self.gathers:
            times = forwards[gather.stage] + gather.in_backward * backwards[gather.stage]
            for collective in gather.collectives:
                found[collective] += times
        for reduction in self.reductions:
            for collective in reduction.collectives:
                found[collective] += backwards[reduction.stage] if reduction.when == "each" else 1
        return found


def gradient_traffic(
    model: ModelFacts,
    config: Config,
    stages: RankStages,
    optimizer: OptimizerMemory | None = None,
    *,
    on_cpu: bool = False,
    ranks_per_host: int | None = None,
) -> StepTraffic:
    """The collectives of an exact strategy (all_reduce, zero, hierarchical), as they are from the second step on.

    Of a strategy that compresses gradients they are those without compression; of tables with sparse gradients those of
    dense ones.

    Args:
        config: resolved, of a plan whose layout is that of ``model``.
        optimizer: given, what it exchanges of whole parameters is there, too; see `OptimizerMemory.collectives`.
        on_cpu: whether ranks compute on CPU, where what travels has to fit a slot of shared memory.
        ranks_per_host: data ranks on each host, where ``hierarchical`` is to find them; None: all.
    """
    return _Composer(model, config, stages, on_cpu, ranks_per_host).traffic(optimizer)


class _Composer:
    """Of one rank of a plan."""

    def __init__(
        self, model: ModelFacts, config: Config, stages: RankStages, on_cpu: bool, ranks_per_host: int | None
    ) -> None:
        self._model, self._config, self._stages, self._on_cpu = model, config, stages, on_cpu
        self._axes = axes = PlanAxes(config)
        self._zero = ZeroTraffic(axes, on_cpu=on_cpu)
        self._units: ShardedUnits = sharded_units(model, axes, stages)
        self._is_zero = bool(config.parallel.zero.stage)
        #: by the id of a kind, and whether its rows are cut: elements, dtype, dtype of the sum, axes
        self._of_kind: dict[tuple[int, bool], tuple[int, str, str, tuple[str, ...]]] = {}
        self._cut = {one.name for one in self._units.cut}
        strategy = config.parallel.data_strategy
        self._per_host: int | None = None
        if strategy["type"] == "hierarchical":
            options = HierarchicalOptions(**{key: value for key, value in strategy.items() if key != "type"})
            data = config.parallel.data or 1
            self._per_host = options.ranks_per_host(data) or ranks_per_host or data
        self._frees = axes.stage == 3 and config.parallel.tensor.weights != "step"

    def traffic(self, optimizer: OptimizerMemory | None) -> StepTraffic:
        units = self._units
        lasting: list[tuple[int | None, Sequence[ParameterFacts]]] = [(None, units.root)] if units.root else []
        lasting += [] if self._frees else together(units.blocks)
        begin = [each for _, params in lasting for each in self._zero.gathers(params)]
        gathers = self._gathers(units.blocks) if self._frees else []
        reductions: list[Reduction] = []
        end: list[Collective] = []
        if self._is_zero:
            reductions += self._reductions_of_rows(units.blocks if self._frees else (), lasting)
            end += [each for bucket in self._buckets() for each in bucket.collectives]
        else:
            reductions += self._buckets()
        end += self._tied()
        end += self._numbers()
        if optimizer is not None:
            end += optimizer.collectives(self._config, self._axes, as_stored(units, self._axes))
        return StepTraffic(tuple(begin), tuple(gathers), self._gathered(), tuple(reductions), tuple(end))

    # -- weights ------------------------------------------------------------------------------------------

    def _gathers(self, units: Iterable[Unit]) -> list[BlockGather]:
        of_block: dict[int, list[Collective]] = {}
        for block, params in units:
            of_block.setdefault(block, []).extend(self._zero.gathers(params))
        is_again = self._config.parallel.tensor.weights == "matmul"
        return [
            BlockGather(
                self._stages.stage_of[block], block, is_again and block >= self._model.first_trained, tuple(moved)
            )
            for block, moved in of_block.items()
            if moved
        ]

    def _gathered(self) -> frozenset[tuple[int, int]]:
        if not self._frees:
            return frozenset()
        keeps = self._config.parallel.tensor.weights != "matmul"
        held: Counter[int] = Counter()
        found = []
        for action in self._stages.actions:
            if action.kind == "forward":
                if not (keeps and held[action.stage]):
                    found.append((action.stage, action.microbatch))
                held[action.stage] += 1
            elif action.kind in INPUT_GRADIENT:
                held[action.stage] -= 1
        return frozenset(found)

    # -- gradients ----------------------------------------------------------------------------------------

    def _reductions_of_rows(
        self, freed: Iterable[Unit], lasting: Sequence[tuple[int | None, Sequence[ParameterFacts]]]
    ) -> list[Reduction]:
        """Of ZeRO: in the order of backward, those of blocks that are whole for the step, and of the root, last."""
        found: list[Reduction] = []
        transient: set[int] = set()
        for block, params in reversed([*freed]):
            for travelling, moved in self._zero.reductions(params):
                stage = self._stage_of(travelling)
                transient.add(stage)
                found.append(Reduction(stage, block, "each", moved))
        started: dict[int, int] = {}
        for _, params in reversed(lasting):
            for travelling, moved in self._zero.reductions(params):
                stage = self._stage_of(travelling)
                at = min(self._completed_in(one, stage) for one in travelling)
                started[stage] = at = min(started.get(stage, at), at)
                is_early = stage in self._stages.starts_early and stage not in transient
                found.append(Reduction(stage, at if is_early else None, "last", moved))
        return [one for one in found if one.collectives]

    def _stage_of(self, params: Iterable[ParameterFacts]) -> int:
        """With whose backward the gradients of all of them are complete."""
        stages = [self._stages.last_stage_of(one.blocks) for one in params]
        return max((stage for stage in stages if stage is not None), key=self._stages.order.index)

    def _completed_in(self, one: ParameterFacts, stage: int) -> int:
        """The block of a stage whose backward completes the gradient of a parameter."""
        inside = self._stages.blocks_of(stage)
        return min((block for block in one.blocks if block in inside), default=inside.stop - 1)

    def _buckets(self) -> list[Reduction]:
        """The all-reduces of each stage, in the order of stages."""
        limit = int(self._config.comm.bucket_mb * 2**20)
        by_stage: dict[int, list[Gradient]] = {stage: [] for stage in self._stages.order}
        for one, stage in self._trained:
            by_stage[stage].append(self._gradient(one, stage))
        found = []
        for stage, gradients in by_stage.items():
            at: int | None = None
            for bucket in buckets_of(gradients, limit, on_cpu=self._on_cpu):
                at = bucket.block if at is None else min(at, bucket.block)
                block = at if stage in self._stages.starts_early else None
                found.append(Reduction(stage, block, "last", self._sum(bucket)))
        return found

    @cached_property
    def _trained(self) -> list[tuple[ParameterFacts, int]]:
        """The parameters of the rank that get a gradient, in the order of the model, each with its stage."""
        trained = [one for one in self._units.every if one.kind.is_trainable]
        return [(one, self._stage_of([one])) for one in trained]

    def _gradient(self, one: ParameterFacts, stage: int) -> Gradient:
        is_cut = self._is_zero and one.name in self._cut
        key = id(one.kind), is_cut
        if key not in self._of_kind:
            self._of_kind[key] = self._of_rows(one.kind) if is_cut else self._of_whole(one.kind)
        return Gradient(*self._of_kind[key], self._completed_in(one, stage))

    def _of_whole(self, kind: ParameterKind) -> tuple[int, str, str, tuple[str, ...]]:
        return kind.elements, kind.gradient, kind.reduced, self._axes.sums(kind.gradient_axes)

    def _of_rows(self, kind: ParameterKind) -> tuple[int, str, str, tuple[str, ...]]:
        rows, stored = self._axes.rows_of(kind.cut_axes), kind.sharded[3]
        elements = rows_per_rank(kind, self._axes.size(rows)) * kind.row
        return elements, stored, self._model.reduced(stored), self._axes.sums(kind.gradient_axes, rows)

    def _sum(self, bucket: BucketTraffic) -> tuple[Collective, ...]:
        if self._per_host is None:
            return flat_sum(self._axes, bucket)
        return two_level_sum(self._axes, bucket, self._per_host)

    def _tied(self) -> list[Collective]:
        tied = [
            (self._gradient(one, stage), ranks)
            for one, stage in self._trained
            if len(ranks := self._stages.ranks_with(one.blocks)) > 1
        ]
        return tied_sums(tied)

    # -- the step's numbers -------------------------------------------------------------------------------

    def _numbers(self) -> list[Collective]:
        axes, grid = self._axes, self._axes.grid
        ranks, name = axes.size(axes.everywhere), axes.name(axes.everywhere)
        if ranks == 1:
            return []
        data = grid.axes("data")
        shares_batch = any(size > 1 for axis, size in grid.sizes.items() if axis not in data)
        held = [("all_reduce", _NUMBERS + shares_batch)]
        if self._model.routers:
            held.append(("all_reduce routers", sum(num + len(SUMS) for num in self._model.routers)))
        return [
            Collective(operation, name, ranks, numbers * _FLOAT64, "float64", axes.everywhere)
            for operation, numbers in held
        ]
