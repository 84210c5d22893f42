"""What the ranks of a pipeline stage store: weights, gradients and their buffers, the state of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from colossus.config import Config
from colossus.data_parallel.zero.zero_memory import ParameterSize, zero_memory
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts, ParameterKind, itemsize
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.rank_memory import StoredBytes
from colossus.planner.rank_stages import RankStages
from colossus.planner.sharded_units import as_stored, sharded_units


def stored_bytes(
    model: ModelFacts,
    config: Config,
    stages: RankStages,
    optimizer: OptimizerMemory,
    *,
    accumulates: bool,
    exact: bool = True,
) -> StoredBytes:
    """The bytes of one pipeline rank, as its data-parallel strategy stores them.

    Args:
        config: resolved, of a plan whose layout is that of ``model``.
        accumulates: whether there are several microbatches, over which gradients are summed.
        exact: see `OptimizerMemory.bytes`.
    """
    return _RankStorage(model, config, stages).count(optimizer, accumulates, exact)


class _RankStorage:
    """The parameters of a pipeline rank."""

    def __init__(self, model: ModelFacts, config: Config, stages: RankStages) -> None:
        self._config, self._axes, self._model, self._stages = config, PlanAxes(config), model, stages
        self._units = units = sharded_units(model, self._axes, stages)
        self._blocks, self._root, self._whole = [params for _, params in units.blocks], units.root, units.whole
        self._sizes: dict[ParameterKind, ParameterSize] = {}
        self._is_zero = bool(config.parallel.zero.stage)

    def count(self, optimizer: OptimizerMemory, accumulates: bool, exact: bool) -> StoredBytes:
        zero, scope, stage = self._config.parallel.zero, self._config.parallel.tensor.weights, self._axes.stage
        weights = sum(one.kind.elements * itemsize(one.kind.dtype) for one in self._whole) + self._buffers()
        #: whose gradients are not those of rows
        trained = [
            one for one in (self._whole if self._is_zero else (*self._whole, *self._units.cut)) if one.kind.is_trainable
        ]
        gradients = between = sum(_gradient_bytes(one) for one in trained)
        gathered = buffers = on_host = reduced = 0
        if stage:
            sizes = [[self._size(one.kind) for one in block] for block in self._blocks]
            root = [self._size(one.kind) for one in self._root]
            memory = zero_memory(sizes, root, stage=stage, scope=scope, states=0, offload=zero.offload)
            weights += memory.whole + memory.stored
            gathered = memory.whole_peak - memory.whole
            if self._is_zero:
                gradients, between = gradients + memory.gradients_peak, between + memory.gradients
                reduced = memory.gradients + _reduced_at_once(sizes, root)
                if stage == 3 and scope != "step":  # while activations are there, too
                    gradients, buffers, reduced = gradients + memory.gradients, reduced - memory.gradients, 0
            on_host = memory.stored if zero.offload else 0
        if not (self._is_zero and stage):
            bucketed = [one for one in trained if self._axes.sums(one.kind.gradient_axes)]
            buffers += _in_buckets(bucketed)
            if not accumulates:  # a gradient is in its bucket as soon as it is made
                gradients -= sum(_gradient_bytes(one) for one in bucketed)
        buffers += _in_buckets(one for one in trained if len(self._stages.ranks_with(one.blocks)) > 1)
        kept, update = optimizer.bytes(self._config, self._axes, as_stored(self._units, self._axes), exact=exact)
        on_host += kept if zero.offload and stage else 0
        return StoredBytes(weights, gathered, gradients, buffers, kept, max(update, reduced), between, on_host)

    def _buffers(self) -> int:
        """Of the rank's stages, and of no block at all."""
        own = {block for stage in self._stages.stages for block in self._stages.blocks_of(stage)}
        return sum(size for size, blocks in self._model.buffers if not blocks or not own.isdisjoint(blocks))

    def _size(self, kind: ParameterKind) -> ParameterSize:
        found = self._sizes.get(kind)
        if found is None:
            computed, gradient, _, stored = kind.sharded
            ranks = self._axes.size(self._axes.rows_of(kind.cut_axes))
            widths = itemsize(computed), itemsize(stored), itemsize(gradient)
            found = self._sizes[kind] = ParameterSize(kind.shape, kind.rows, ranks, *widths, kind.is_trainable)
        return found


def _gradient_bytes(one: ParameterFacts) -> int:
    return one.kind.elements * itemsize(one.kind.gradient)


def _in_buckets(params: Iterable[ParameterFacts]) -> int:
    """Their gradients, and a flag behind each."""
    return sum((one.kind.elements + 1) * itemsize(one.kind.reduced) for one in params)


def _reduced_at_once(blocks: list[list[ParameterSize]], root: list[ParameterSize]) -> int:
    """Of ZeRO: gradients of two blocks that are being reduced, and the rows of a block as they arrive."""
    every = [block for block in (*blocks, root) if block]
    reduced = sorted(sum(one.elements * one.gradient for one in block if one.is_trainable) for block in every)[-2:]
    arriving = max((sum(one.elements * one.computed for one in block) for block in every), default=0)
    return sum(reduced) + arriving
