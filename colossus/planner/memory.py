"""The predicted memory of a plan, by kind, without a process or a device.

All ranks with the same index along the pipeline hold equally much (shards are padded to equal sizes), so that one of
them stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from colossus.config import Config
from colossus.config.plans import name_of
from colossus.planner.layout_profile import LayoutProfile, profile_layout
from colossus.planner.memory_play import MemoryPlay
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.plan_estimate import PlanMemory, RankMemory, StoredBytes
from colossus.planner.plan_rank import PlanRank
from colossus.planner.plan_stages import layout_config, splits_backward, stages_of
from colossus.planner.rank_parameters import PlanAxes, RankParameters

#: strategies whose memory is counted completely: beside buckets they store nothing that grows with the model
COUNTED_STRATEGIES = ("all_reduce", "zero", "hierarchical")


def predict_memory(config: Config, *, on_cpu: bool = False) -> PlanMemory:
    """Predict the memory of a resolved config's plan.

    Args:
        config: the config.
        on_cpu: see `colossus.planner.plan_rank.PlanRank`.

    Raises:
        ConfigError: see `colossus.planner.layout_profile.profile_layout` and
            `colossus.planner.plan_stages.stages_of`.
    """
    profile = profile_of(config, on_cpu=on_cpu)
    ranks = [PlanRank(profile.facts, config, stages, on_cpu=on_cpu) for stages in stages_of(config, profile.facts)]
    return memory_of(config, profile, ranks)


def profile_of(config: Config, *, on_cpu: bool) -> LayoutProfile:
    """Return the profile of the layout of a plan; see `colossus.planner.layout_profile.profile_layout`."""
    is_sharded = bool(PlanAxes(config).stage)
    layout = layout_config(config, is_sharded=is_sharded)
    return profile_layout(layout, split_backward=splits_backward(config), is_sharded=is_sharded, on_cpu=on_cpu)


def memory_of(
    config: Config,
    profile: LayoutProfile,
    ranks: Sequence[PlanRank],
    *,
    times: float = 1.0,
    exact: bool = True,
) -> PlanMemory:
    """Return the memory of a plan whose layout has this profile.

    Args:
        config: the resolved config of the plan.
        profile: profile of its layout.
        ranks: all pipeline ranks, or some.
        times: samples of a microbatch over those of the profile; activations are scaled by it.
        exact: see `colossus.planner.optimizer_memory.OptimizerMemory.bytes`.
    """
    memories: list[RankMemory] = []
    for rank in ranks:
        stored, stages = stored_bytes(rank, profile.optimizer, exact=exact), rank.stages
        play = MemoryPlay(profile.blocks, rank, stored, times=times)
        memories.append(RankMemory(stages.rank, stages.stages, stages.in_flight, stored, play.run()))
    return PlanMemory(tuple(memories), tuple(_notes(config)))


def stored_bytes(rank: RankParameters, optimizer: OptimizerMemory, *, exact: bool = True) -> StoredBytes:
    """Return the bytes that one pipeline rank stores under its data-parallel strategy.

    Args:
        rank: the rank.
        optimizer: memory of the optimizer.
        exact: see `OptimizerMemory.bytes`.
    """
    axes, zero = rank.axes, rank.config.parallel.zero
    own = {block for stage in rank.stages.stages for block in rank.stages.blocks_of(stage)}
    weights = sum(size for size, blocks in rank.model.buffers if not blocks or not own.isdisjoint(blocks))
    between = rows = 0
    for param, stored, count in rank.counts:
        form, size = param.kind.form, stored.elements * stored.dtype.itemsize
        if not stored.is_cut:
            weights += count * size
            between += count * param.kind.gradient_bytes * form.is_trainable
            continue
        is_view = len(form.shards) == 1 and form.dtypes.allow_views(axes.stage, offload=zero.offload)
        if axes.stage < 3:  # the whole parameter stays, with the padding of its last rows where the rows are a view
            whole = axes.size(stored.rows) * stored.elements if is_view else form.elements
            weights += count * whole * form.dtypes.computed.itemsize
        rows += count * size * (not is_view)
        between += count * size * form.is_trainable
    state, update = optimizer.bytes(rank, exact=exact)
    return StoredBytes(weights + rows, between, state, update, rows + state if axes.stage and zero.offload else 0)


def _notes(config: Config) -> list[str]:
    kind = config.parallel.data_strategy["type"]
    if kind in COUNTED_STRATEGIES:
        return []
    return [f"the strategy {name_of(kind)} needs more memory (copies of parameters, messages), which is not counted"]
