"""The collectives of weights, gradients and a step's numbers that a pipeline rank starts in a step, and their times.

Collectives of activations are not here, nor are those of weights in tensor parallelism: the trace of a layout has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from colossus.config import Config
from colossus.data_parallel.options.exact_options import HierarchicalOptions
from colossus.layers.router import SUMS
from colossus.planner.bucket_traffic import BucketTraffic, Gradient, buckets_of, flat_sum, tied_sums, two_level_sum
from colossus.planner.collective import Collective
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts, ParameterKind, itemsize
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.rank_stages import RankStages
from colossus.planner.sharded_units import ShardedUnits, rows_per_rank, sharded_units
from colossus.planner.step_traffic import BlockGather, Reduction, StepTraffic
from colossus.planner.zero_traffic import RowTraffic, Unit, ZeroTraffic, together
from colossus.schedule.actions import INPUT_GRADIENT

#: the step's numbers: loss, count, squares of gradients, requests to stop, marks of programs
_NUMBERS = 5
_FLOAT64 = 8


@dataclass(frozen=True)
class PlanRank:
    """A pipeline rank of a plan.

    Attributes:
        config: resolved config of the plan.
        stages: stages of the rank.
        units: its parameters.
        traffic: its collectives of weights and gradients.
    """

    config: Config
    stages: RankStages
    units: ShardedUnits
    traffic: StepTraffic

    def traffic_with(self, optimizer: OptimizerMemory) -> StepTraffic:
        """Return the traffic with what the optimizer exchanges of whole parameters."""
        more = optimizer.collectives(self.config, self.units)
        return replace(self.traffic, end=(*self.traffic.end, *more))


def plan_rank(
    model: ModelFacts,
    config: Config,
    stages: RankStages,
    *,
    on_cpu: bool = False,
    ranks_per_host: int | None = None,
) -> PlanRank:
    """Return a rank with the traffic of an exact strategy (all_reduce, zero, hierarchical) in its later steps.

    Compression of gradients is ignored, and sparse gradients of tables count as dense.

    Args:
        model: facts of the model.
        config: resolved config of a plan with the layout of ``model``.
        stages: the stages of the rank.
        on_cpu: whether ranks compute on CPU, where a message has to fit a slot of shared memory.
        ranks_per_host: data ranks of each host, for ``hierarchical`` without a number of its own; None: all.
    """
    composer = _Composer(model, config, stages, on_cpu, ranks_per_host)
    return PlanRank(config, stages, composer.units, composer.traffic())


class _Composer:
    """The traffic of one rank of a plan, in the making."""

    def __init__(
        self, model: ModelFacts, config: Config, stages: RankStages, on_cpu: bool, ranks_per_host: int | None
    ) -> None:
        self._model, self._config, self._stages, self._on_cpu = model, config, stages, on_cpu
        self._axes = axes = PlanAxes(config)
        self._zero = ZeroTraffic(axes, on_cpu=on_cpu)
        self.units: ShardedUnits = sharded_units(model, axes, stages)
        self._is_zero = bool(config.parallel.zero.stage)
        #: elements, dtype, dtype of the sum and axes of a gradient, by the id of its kind and whether its rows are cut
        self._of_kind: dict[tuple[int, bool], tuple[int, str, str, tuple[str, ...]]] = {}
        self._cut = {param.name for param in self.units.cut}
        strategy = config.parallel.data_strategy
        self._per_host: int | None = None
        if strategy["type"] == "hierarchical":
            options = HierarchicalOptions(**{key: value for key, value in strategy.items() if key != "type"})
            data = config.parallel.data or 1
            self._per_host = options.ranks_per_host(data) or ranks_per_host or data
        #: whether the weights of blocks are freed within the step, and gathered again
        self._frees = axes.stage == 3 and config.parallel.tensor.weights != "step"

    def traffic(self) -> StepTraffic:
        units = self.units
        lasting: list[tuple[int | None, Sequence[ParameterFacts]]] = [(None, units.root)] if units.root else []
        lasting += [] if self._frees else together(units.blocks)
        rows = [flat for _, params in lasting for flat in self._zero.rows(params)]
        begin = [flat.gather for flat in rows if flat.gather.ranks > 1]
        whole = sum(flat.whole for flat in rows) if self._axes.stage == 3 else 0
        gathers = self._gathers(units.blocks) if self._frees else []
        reductions: list[Reduction] = []
        end: list[Collective] = []
        buckets, tied = self._buckets(), self._tied()
        if self._is_zero:
            reductions += self._reductions_of_rows(units.blocks if self._frees else (), lasting)
        if self._is_zero and not self._frees:
            end += [collective for bucket in buckets for collective in bucket.collectives]
        else:
            reductions += buckets
        end += tied
        in_buckets = sum(bucket.collectives[0].input_bytes for bucket in buckets)
        in_buckets += sum(collective.input_bytes for collective in tied)
        end += self._numbers()
        return StepTraffic(
            tuple(begin),
            tuple(gathers),
            self._gathered(),
            tuple(reductions),
            tuple(end),
            whole,
            in_buckets,
            *self._bytes_of_gradients(gathers),
        )

    # -- weights ------------------------------------------------------------------------------------------

    def _gathers(self, units: Iterable[Unit]) -> list[BlockGather]:
        is_again = self._config.parallel.tensor.weights == "matmul"
        by_block: dict[int, list[RowTraffic]] = {}
        for block, params in units:
            by_block.setdefault(block, []).extend(self._zero.rows(params))
        return [
            BlockGather(
                self._stages.stage_of[block],
                block,
                is_again and block >= self._model.first_trained,
                tuple(flat.gather for flat in rows if flat.gather.ranks > 1),
                sum(flat.whole for flat in rows),
                sum(flat.gathering for flat in rows),
                sum(flat.gradients for flat in rows),
            )
            for block, rows in by_block.items()
        ]

    def _gathered(self) -> frozenset[tuple[int, int]]:
        if not self._frees:
            return frozenset()
        keeps = self._config.parallel.tensor.weights != "matmul"
        in_flight: Counter[int] = Counter()
        forwards = []
        for action in self._stages.actions:
            if action.kind == "forward":
                if not (keeps and in_flight[action.stage]):
                    forwards.append((action.stage, action.microbatch))
                in_flight[action.stage] += 1
            elif action.kind in INPUT_GRADIENT:
                in_flight[action.stage] -= 1
        return frozenset(forwards)

    # -- gradients ----------------------------------------------------------------------------------------

    def _reductions_of_rows(
        self, freed: Iterable[Unit], lasting: Sequence[tuple[int | None, Sequence[ParameterFacts]]]
    ) -> list[Reduction]:
        """Return ZeRO's reductions in the order of backward; those of parameters that stay whole come last.

        Args:
            freed: units whose weights are freed within the step.
            lasting: units and root parameters whose weights stay whole for the step.
        """
        reductions: list[Reduction] = []
        transient: set[int] = set()

        def add(flat: RowTraffic, stage: int, block: int | None, when: Literal["each", "last"]) -> None:
            assert flat.reduction is not None
            collectives = (flat.reduction,) if flat.reduction.ranks > 1 else ()
            freed = flat.gradients if self._axes.stage > 1 else 0
            reductions.append(Reduction(stage, block, when, collectives, freed, flat.reducing, flat.sums))

        for block, params in reversed([*freed]):
            for flat in self._zero.rows(params):
                if flat.reduction is not None:
                    stage = self._stage_of([params[place] for place in flat.places])
                    transient.add(stage)
                    add(flat, stage, block, "each")
        started: dict[int, int] = {}
        for _, params in reversed(lasting):
            for flat in self._zero.rows(params):
                if flat.reduction is not None:
                    reduced = [params[place] for place in flat.places]
                    stage = self._stage_of(reduced)
                    at = min(self._completed_in(param, stage) for param in reduced)
                    started[stage] = at = min(started.get(stage, at), at)
                    is_early = stage in self._stages.starts_early and stage not in transient
                    add(flat, stage, at if is_early else None, "last")
        return reductions

    def _stage_of(self, params: Iterable[ParameterFacts]) -> int:
        """Return the stage whose backward completes the gradients of all of these parameters."""
        stages = {stage for param in params for stage in self._stages.stages_with(param.blocks)}
        return max(stages, key=self._stages.order.index)

    def _completed_in(self, param: ParameterFacts, stage: int) -> int:
        """Return the block of a stage whose backward completes the gradient of a parameter."""
        inside = self._stages.blocks_of(stage)
        return next((block for block in param.blocks if block in inside), inside.stop - 1)

    def _buckets(self) -> list[Reduction]:
        """Return the all-reduces of each stage, in the order in which stages are reduced."""
        limit = int(self._config.comm.bucket_mb * 2**20)
        by_stage: dict[int, list[Gradient]] = {stage: [] for stage in self._stages.order}
        freed = {param.name for _, params in self.units.blocks for param in params} if self._frees else set()
        for param, stage in sorted(self._trained, key=lambda trained: trained[0].name in freed):
            by_stage[stage].append(self._gradient(param, stage))
        reductions = []
        for stage, gradients in by_stage.items():
            at: int | None = None
            for bucket in buckets_of(gradients, limit, on_cpu=self._on_cpu):
                at = bucket.block if at is None else min(at, bucket.block)
                block = at if stage in self._stages.starts_early else None
                reductions.append(Reduction(stage, block, "last", self._sum(bucket)))
        return reductions

    @cached_property
    def _trained(self) -> list[tuple[ParameterFacts, int]]:
        """Return the parameters of the rank that get a gradient, in the order of the model, each with its stage."""
        trained = [param for param in self.units.every if param.kind.is_trainable]
        #: stages by blocks: those of a layer's parameters are the same
        stages = {param.blocks: 0 for param in trained}
        for blocks in stages:
            stages[blocks] = max(self._stages.stages_with(blocks), key=self._stages.order.index)
        return [(param, stages[param.blocks]) for param in trained]

    def _gradient(self, param: ParameterFacts, stage: int) -> Gradient:
        is_cut = self._is_zero and param.name in self._cut
        key = id(param.kind), is_cut
        if key not in self._of_kind:
            self._of_kind[key] = self._of_rows(param.kind) if is_cut else self._of_whole(param.kind)
        return Gradient(*self._of_kind[key], self._completed_in(param, stage))

    def _bytes_of_gradients(self, gathers: Iterable[BlockGather]) -> tuple[Counter[int], int]:
        """Return ``made`` and ``bucketed`` of `StepTraffic`."""
        made: Counter[int] = Counter()
        bucketed = 0
        #: bytes of a gradient, and whether it is a view of a bucket
        of_kind: dict[tuple[int, bool], tuple[int, bool]] = {}
        for param, _ in self._trained:
            kind, is_cut = param.kind, param.name in self._cut
            if (id(kind), is_cut) not in of_kind:
                is_summed = not (self._is_zero and is_cut) and bool(self._axes.sums(kind.gradient_axes))
                nbytes = kind.elements * itemsize(kind.sharded[1] if is_cut else kind.gradient)
                of_kind[id(kind), is_cut] = nbytes, is_summed and kind.gradient == kind.reduced
            size, is_in_bucket = of_kind[id(kind), is_cut]
            if is_in_bucket:
                bucketed += size
            else:
                made[self._completed_in(param, self._stages.stages_with(param.blocks)[0])] += size
        for gather in gathers:
            made[gather.block] -= gather.gradients
        return made, bucketed

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
            (self._gradient(param, stage), ranks)
            for param, stage in self._trained
            if len(param.blocks) > 1 and len(ranks := self._stages.ranks_with(param.blocks)) > 1
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
        sums = [("all_reduce", _NUMBERS + shares_batch)]
        if self._model.routers:
            sums.append(("all_reduce routers", sum(num + len(SUMS) for num in self._model.routers)))
        return [
            Collective(operation, name, ranks, count * _FLOAT64, "float64", axes.everywhere)
            for operation, count in sums
        ]
