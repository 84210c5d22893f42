"""The bytes that a pipeline rank stores: weights, gradients and their buffers, optimizer state."""

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
    """Return the bytes that one pipeline rank stores under its data-parallel strategy.

    Args:
        model: facts of the model.
        config: resolved config of a plan with the layout of ``model``.
        stages: stages of the rank.
        optimizer: memory of the optimizer.
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
        weights = sum(param.kind.elements * itemsize(param.kind.dtype) for param in self._whole) + self._buffers()
        #: trained parameters whose gradients ZeRO does not cut
        trained = [
            param
            for param in (self._whole if self._is_zero else (*self._whole, *self._units.cut))
            if param.kind.is_trainable
        ]
        gradients = between = sum(_gradient_bytes(param) for param in trained)
        gathered = buffers = on_host = reduced = 0
        if stage:
            sizes = [[self._size(param.kind) for param in block] for block in self._blocks]
            root = [self._size(param.kind) for param in self._root]
            memory = zero_memory(sizes, root, stage=stage, scope=scope, states=0, offload=zero.offload)
            weights += memory.whole + memory.stored
            gathered = memory.whole_peak - memory.whole
            if self._is_zero:
                gradients, between = gradients + memory.gradients_peak, between + memory.gradients
                reduced = memory.gradients + _reduced_at_once(sizes, root)
                if stage == 3 and scope != "step":  # reductions run while there are activations, too
                    gradients, buffers, reduced = gradients + memory.gradients, reduced - memory.gradients, 0
            on_host = memory.stored if zero.offload else 0
        if not (self._is_zero and stage):
            bucketed = [param for param in trained if self._axes.sums(param.kind.gradient_axes)]
            buffers += _in_buckets(bucketed)
            if not accumulates:  # a gradient is in its bucket as soon as it is made
                gradients -= sum(_gradient_bytes(param) for param in bucketed)
        buffers += _in_buckets(param for param in trained if len(self._stages.ranks_with(param.blocks)) > 1)
        state, update = optimizer.bytes(self._config, self._axes, as_stored(self._units, self._axes), exact=exact)
        on_host += state if zero.offload and stage else 0
        return StoredBytes(weights, gathered, gradients, buffers, state, max(update, reduced), between, on_host)

    def _buffers(self) -> int:
        """Return the bytes of buffers of the rank's stages, and of those that belong to no block."""
        own = {block for stage in self._stages.stages for block in self._stages.blocks_of(stage)}
        return sum(size for size, blocks in self._model.buffers if not blocks or not own.isdisjoint(blocks))

    def _size(self, kind: ParameterKind) -> ParameterSize:
        if kind not in self._sizes:
            computed, gradient, _, stored = kind.sharded
            ranks = self._axes.size(self._axes.rows_of(kind.cut_axes))
            widths = itemsize(computed), itemsize(stored), itemsize(gradient)
            self._sizes[kind] = ParameterSize(kind.shape, kind.rows, ranks, *widths, kind.is_trainable)
        return self._sizes[kind]


def _gradient_bytes(param: ParameterFacts) -> int:
    return param.kind.elements * itemsize(param.kind.gradient)


def _in_buckets(params: Iterable[ParameterFacts]) -> int:
    """Return the bytes of buckets with the gradients of these parameters, and a flag for each."""
    return sum((param.kind.elements + 1) * itemsize(param.kind.reduced) for param in params)


def _reduced_at_once(blocks: list[list[ParameterSize]], root: list[ParameterSize]) -> int:
    """Return the bytes of ZeRO's reductions in flight: gradients of two blocks, and the arriving rows of a block."""
    every = [block for block in (*blocks, root) if block]
    reduced = sorted(sum(param.elements * param.gradient for param in block if param.is_trainable) for block in every)[
        -2:
    ]
    arriving = max((sum(param.elements * param.computed for param in block) for block in every), default=0)
    return sum(reduced) + arriving
