"""The bytes that a pipeline rank stores: weights, gradients, optimizer state."""

from __future__ import annotations

from colossus.planner.gradient_traffic import PlanRank
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts, itemsize
from colossus.planner.rank_memory import StoredBytes
from colossus.planner.rank_stages import RankStages


def stored_bytes(model: ModelFacts, rank: PlanRank, optimizer: OptimizerMemory, *, exact: bool = True) -> StoredBytes:
    """Return the bytes that one pipeline rank stores under its data-parallel strategy.

    Args:
        model: facts of the model.
        rank: the rank.
        optimizer: memory of the optimizer.
        exact: see `OptimizerMemory.bytes`.
    """
    units, axes, zero = rank.units, rank.units.axes, rank.config.parallel.zero
    weights, between, rows = _buffers(model, rank.stages), 0, 0
    offloads = bool(axes.stage and zero.offload)
    for param, is_cut, count in units.kinds:
        kind = param.kind
        if not is_cut:
            weights += count * kind.elements * itemsize(kind.dtype)
            between += count * gradient_bytes(param) * kind.is_trainable
            continue
        computed, _, _, stored = kind.sharded
        ranks = axes.size(axes.rows_of(kind.cut_axes))
        elements = units.as_stored(param, True).elements
        is_view = axes.stage < 3 and not zero.offload and len(kind.rows) == 1 and computed == stored
        if axes.stage < 3:  # the whole parameter stays, with the padding of its last rows where the rows are a view
            weights += count * (ranks * elements if is_view else kind.elements) * itemsize(computed)
        if not is_view:
            rows += count * elements * itemsize(stored)
        between += count * elements * itemsize(stored) * kind.is_trainable
    state, update = optimizer.bytes(rank.config, units, exact=exact)
    return StoredBytes(weights + rows, state, between, update, rows + state if offloads else 0)


def _buffers(model: ModelFacts, stages: RankStages) -> int:
    """Return the bytes of buffers of a rank's stages, and of those that belong to no block."""
    own = {block for stage in stages.stages for block in stages.blocks_of(stage)}
    return sum(size for size, blocks in model.buffers if not blocks or not own.isdisjoint(blocks))


def gradient_bytes(param: ParameterFacts) -> int:
    """Return the bytes of the gradient of a parameter that ZeRO does not cut."""
    return param.kind.elements * itemsize(param.kind.gradient)
