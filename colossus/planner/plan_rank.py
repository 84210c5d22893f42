"""A pipeline rank of a plan: its parameters, and its collectives of weights, gradients and a step's numbers.

Collectives of activations are not here, nor are those of weights in tensor parallelism: the trace of a layout has them.
Which parameters travel together is decided by the functions that the engine calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from colossus.comm import shared_memory
from colossus.config import Config
from colossus.data_parallel.options.exact_options import HierarchicalOptions
from colossus.data_parallel.zero.row_forms import RowForm, rows_together
from colossus.gradients.bucket_sum import BETWEEN
from colossus.gradients.buckets import GradientForm, cut_into_buckets
from colossus.layers.router import SUMS
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts
from colossus.planner.plan_stages import RankStages
from colossus.planner.rank_parameters import RankParameters, StoredKind
from colossus.planner.step_traffic import BlockGather, Collective, Reduction, RowTraffic
from colossus.schedule.actions import INPUT_GRADIENT, LAST_USE

#: the step's numbers: loss, count, squares of gradients, requests to stop, marks of programs
_NUMBERS = 5
_FLOAT64 = 8


class PlanRank(RankParameters):
    """The parameters and the traffic of a pipeline rank, with an exact strategy (all_reduce, zero, hierarchical).

    Compression of gradients is ignored, and sparse gradients of tables count as dense.

    Args:
        model, config, stages: see `RankParameters`.
        on_cpu: whether ranks compute on CPU, where a message has to fit a slot of shared memory.
        ranks_per_host: data ranks of each host, for ``hierarchical`` without a number of its own; None: all.

    Attributes:
        begin: collectives before the first forward: gathers of weights that stay whole for the step.
        gathers: gathers of other blocks, in the order of the chain.
        gathered: (stage, microbatch) of each forward that has to gather freed weights.
        reductions: reductions of each stage, in the order in which they start.
        end: collectives after the last backward and all reductions, one after the other.
        whole: bytes of weights that are gathered for the step, beyond those that are stored (ZeRO-3).
        buckets: bytes of all buckets of gradients, which are allocated once.
        made: for each block, the bytes of gradients that its backward makes and that stay in a step: all but those of
            weights that are gathered for the block, and those in buckets. The block of a gradient is the last of the
            rank that uses it.
        bucketed: bytes of the gradients that are views of buckets.
    """

    def __init__(
        self, model: ModelFacts, config: Config, stages: RankStages, *,
        on_cpu: bool = False, ranks_per_host: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, config, stages)
        self._on_cpu, self._per_host = on_cpu, ranks_per_host
        self._flat_limit = shared_memory.flat_limit(torch.device("cpu" if on_cpu else "cuda"))
        #: traffic of units by the ids of their parameters' kinds: equal units have equal collectives
        self._rows: dict[tuple[int, ...], list[tuple[list[int], RowTraffic]]] = {}

        is_zero = bool(config.parallel.zero.stage)
        lasting = [
            rows for block, params in self.units for _, rows in self._rows_of(params) if not self.frees or block is None
        ]
        buckets, tied = self._buckets(), self._tied()
        summed = [collective for bucket in buckets for collective in bucket.collectives]
        self.begin = tuple(rows.gather for rows in lasting if rows.gather.ranks > 1)
        self.gathers, self.gathered = self._gathers(), self._gathered()
        self.reductions = self._reductions() if is_zero else []
        self.end = (*tied, *self._numbers())
        if is_zero and not self.frees:
            self.end = (*summed, *self.end)
        else:
            self.reductions += buckets
        self.whole = sum(rows.whole for rows in lasting) if self.axes.stage == 3 else 0
        self.buckets = sum(own.input_bytes for own in (*(bucket.collectives[0] for bucket in buckets), *tied))
        self.made: Counter[int] = Counter()
        self.bucketed = 0
        self._add_gradients()

    def times(self) -> Counter[Collective]:
        """Return how often each collective between the first forward and the last backward is started."""
        forwards = Counter(stage for stage, _ in self.gathered)
        backwards = Counter(action.stage for action in self.stages.actions if action.kind in LAST_USE)
        counts: Counter[Collective] = Counter()
        for gather in self.gathers:
            times = forwards[gather.stage] + gather.in_backward * backwards[gather.stage]
            for collective in gather.collectives:
                counts[collective] += times
        for reduction in self.reductions:
            for collective in reduction.collectives:
                counts[collective] += backwards[reduction.stage] if reduction.when == "each" else 1
        return counts

    # -- weights ------------------------------------------------------------------------------------------

    def _rows_of(self, params: Sequence[ParameterFacts]) -> list[tuple[list[int], RowTraffic]]:
        """Return the traffic of a unit, each collective with the indices of its parameters."""
        key = tuple([id(param.kind) for param in params])
        if key not in self._rows:
            forms = [param.kind.form for param in params]
            together = rows_together(forms, self.axes.rows, self.axes.grid.sizes, self._flat_limit)
            self._rows[key] = [
                (indices, self._row_traffic([forms[index] for index in indices])) for indices in together
            ]
        return self._rows[key]

    def _row_traffic(self, forms: Sequence[RowForm]) -> RowTraffic:
        first, over = forms[0], forms[0].axes_of_rows(self.axes.rows)
        ranks, name, dtypes = self.axes.size(over), self.axes.name(over), first.dtypes
        size = sum(form.rows_on(ranks) * form.row for form in forms)
        gather = Collective("all_gather", name, ranks, size * dtypes.computed.itemsize, over)
        reduction = None
        if first.is_trainable:  # a flag for each parameter travels with its gradient
            nbytes = ranks * (size + len(forms)) * dtypes.reduced.itemsize
            reduction = Collective("reduce_scatter", name, ranks, nbytes, over)
        elements, width = sum(form.elements for form in forms), dtypes.gradient.itemsize * first.is_trainable
        most = max(gather.input_bytes, reduction.input_bytes if reduction else 0)
        is_shared = self._on_cpu and ranks > 1 and most <= shared_memory.SLOT_BYTES
        return RowTraffic(
            gather, reduction, elements * dtypes.computed.itemsize, elements * width, size * width, is_shared
        )

    def _gathers(self) -> list[BlockGather]:
        """Return the gather of each block that is freed within the step."""
        is_again = self.config.parallel.tensor.weights == "matmul"
        by_block: dict[int, list[RowTraffic]] = {}
        for block, params in self.units if self.frees else ():
            if block is not None:
                by_block.setdefault(block, []).extend(rows for _, rows in self._rows_of(params))
        return [
            BlockGather(
                self.stages.stage_of[block],
                block,
                is_again and block >= self.model.first_trained,
                tuple(own.gather for own in rows if own.gather.ranks > 1),
                sum(own.whole for own in rows),
                sum(own.buffers(own.gather) for own in rows),
                sum(own.gradients for own in rows),
            )
            for block, rows in by_block.items()
        ]

    def _gathered(self) -> frozenset[tuple[int, int]]:
        """Return stage and microbatch of each forward that has to gather freed weights."""
        keeps = self.config.parallel.tensor.weights != "matmul"
        in_flight: Counter[int] = Counter()
        forwards = []
        for action in self.stages.actions if self.frees else ():
            if action.kind == "forward":
                if not (keeps and in_flight[action.stage]):
                    forwards.append((action.stage, action.microbatch))
                in_flight[action.stage] += 1
            elif action.kind in INPUT_GRADIENT:
                in_flight[action.stage] -= 1
        return frozenset(forwards)

    # -- gradients ----------------------------------------------------------------------------------------

    def _reductions(self) -> list[Reduction]:
        """Return ZeRO's reductions in the order of backward; those of parameters that stay whole come last."""
        reductions: list[Reduction] = []
        transient: set[int] = set()
        #: stage -> the block whose backward completes what is reduced next
        started: dict[int, int] = {}
        for block, unit in reversed(self.units):
            for indices, rows in self._rows_of(unit):
                if rows.reduction is None:
                    continue
                params = [unit[index] for index in indices]
                at, stage = block, max(map(self.stage_of, params), key=self.stages.order.index)
                is_each = self.frees and block is not None
                if is_each:
                    transient.add(stage)
                else:
                    completed = min(self.completed_in(param, stage) for param in params)
                    started[stage] = min(started.get(stage, completed), completed)
                    at = started[stage] if stage in self.stages.starts_early and stage not in transient else None
                collectives = (rows.reduction,) if rows.reduction.ranks > 1 else ()
                freed = rows.gradients if self.axes.stage > 1 else 0
                when: Literal["each", "last"] = "each" if is_each else "last"
                reductions.append(
                    Reduction(stage, at, when, collectives, freed, rows.buffers(rows.reduction), rows.sums)
                )  # fmt: skip
        return reductions

    def _buckets(self) -> list[Reduction]:
        """Return the all-reduces of each stage, in the order in which stages are reduced."""
        by_stage: dict[int, list[tuple[ParameterFacts, StoredKind]]] = {stage: [] for stage in self.stages.order}
        owners = self.trained
        if self.frees:
            freed = {param.name for block, params in self.units if block is not None for param in params}
            owners = sorted(owners, key=lambda own: own[0].name in freed)
        for param, stored in reversed(owners):
            by_stage[self.stage_of(param)].append((param, stored))
        reductions = []
        for stage, backward in by_stage.items():
            completed = len(self.model.blocks)
            for forms, params in self._cut(backward, [stored.summed for _, stored in backward]):
                completed = min(completed, *(self.completed_in(param, stage) for param in params))
                at = completed if stage in self.stages.starts_early else None
                reductions.append(Reduction(stage, at, "last", self._sum(forms)))
        return reductions

    def _cut(
        self, owners: Sequence[tuple[ParameterFacts, StoredKind]], forms: Sequence[GradientForm]
    ) -> Iterator[tuple[list[GradientForm], list[ParameterFacts]]]:
        """Yield the gradients of each bucket, and their parameters."""
        limit = int(self.config.comm.bucket_mb * 2**20)
        for indices in cut_into_buckets(forms, self.model.precision, limit, self._flat_limit):
            yield [forms[index] for index in indices], [owners[index][0] for index in indices]

    def _sum(self, forms: Sequence[GradientForm]) -> tuple[Collective, ...]:
        """Return the all-reduce of a bucket, or the collectives of its sum in and between hosts.

        See `colossus.gradients.bucket_sum.TwoLevelSum`.
        """
        over, axes, strategy = forms[0].axes, self.axes, self.config.parallel.data_strategy
        ranks, name, data = axes.size(over), axes.name(over), self.config.parallel.data or 1
        width, elements = self._reduced(forms[0]), sum(form.elements + 1 for form in forms)
        per_host = data
        if strategy["type"] == "hierarchical":
            options = HierarchicalOptions(**{key: value for key, value in strategy.items() if key != "type"})
            per_host = options.ranks_per_host(data) or self._per_host or data
        if "data" not in over or per_host in (1, data):
            return (Collective("all_reduce", name, ranks, elements * width, over),)
        inner = ranks // data * per_host
        share = -(-elements // inner) * width
        inside = f"{name} inside of hosts"
        return (
            Collective("reduce_scatter", inside, inner, share * inner, ()),
            Collective("all_reduce", BETWEEN, data // per_host, share, ("data",)),
            Collective("all_gather", inside, inner, share, ()),
        )

    def _reduced(self, form: GradientForm) -> int:
        """Return the bytes of an element while a gradient is summed."""
        return self.model.precision.reduce_dtype(form.dtype).itemsize

    def _tied(self) -> list[Collective]:
        """Return the all-reduces of gradients over pipeline ranks; those with the same ranks and dtype share one."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[GradientForm]] = {}
        for param, stored in self.trained:
            ranks = self.stages.ranks_with(param.blocks)
            if len(ranks) > 1:
                groups.setdefault((ranks, stored.summed.dtype), []).append(stored.summed)
        return [
            Collective(
                "all_reduce", "pipeline", len(ranks),
                sum(form.elements + 1 for form in forms) * self._reduced(forms[0]), ("pipeline",),
            )
            for (ranks, _), forms in groups.items()
        ]  # fmt: skip

    def _add_gradients(self) -> None:
        is_zero = bool(self.config.parallel.zero.stage)
        for param, stored in self.trained:
            size = param.kind.form.elements * stored.made.itemsize
            is_summed = bool(stored.summed.axes) and not (is_zero and stored.is_cut)
            if is_summed and stored.made == self.model.precision.reduce_dtype(stored.made):
                self.bucketed += size
            else:
                self.made[self.completed_in(param, self.stages.stages_with(param.blocks)[0])] += size
        for gather in self.gathers:
            self.made[gather.block] -= gather.gradients

    # -- the step's numbers -------------------------------------------------------------------------------

    def _numbers(self) -> list[Collective]:
        axes, grid = self.axes, self.axes.grid
        over = tuple(axis for axis in axes.summed if grid.sizes[axis] > 1)
        if not over:
            return []
        shares_batch = any(size > 1 for axis, size in grid.sizes.items() if axis not in grid.axes("data"))
        sums = [("all_reduce", _NUMBERS + shares_batch)]
        if self.model.routers:
            sums.append(("all_reduce routers", sum(num + len(SUMS) for num in self.model.routers)))
        return [
            Collective(operation, axes.name(over), axes.size(over), count * _FLOAT64, over) for operation, count in sums
        ]
