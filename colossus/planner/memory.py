"""The predicted memory of a plan, by kind, without a process or a device.

All ranks with the same index along the pipeline hold equally much (shards are padded to equal sizes), so that one of
them stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from colossus.config import Config
from colossus.config.plans import name_of
from colossus.planner.gradient_traffic import gradient_traffic
from colossus.planner.layout_blocks import LayoutProfile
from colossus.planner.layout_profile import profile_layout
from colossus.planner.memory_play import MemoryPlay
from colossus.planner.parameter_facts import ModelFacts, itemsize
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.plan_stages import layout_config, splits_backward, stages_of
from colossus.planner.rank_memory import PlanMemory, RankMemory
from colossus.planner.rank_stages import RankStages
from colossus.planner.sharded_units import sharded_units
from colossus.planner.step_traffic import StepTraffic
from colossus.planner.stored import stored_bytes
from colossus.schedule.actions import in_flight

#: strategies whose memory is counted completely: beside buckets they store nothing that grows with the model
COUNTED_STRATEGIES = ("all_reduce", "zero", "hierarchical")


def predict_memory(config: Config, *, on_cpu: bool = False) -> PlanMemory:
    """Predict the memory of a resolved config's plan.

    Args:
        config: the config.
        on_cpu: see `colossus.planner.gradient_traffic.gradient_traffic`.

    Raises:
        ConfigError: see `colossus.planner.layout_profile.profile_layout` and
            `colossus.planner.plan_stages.stages_of`.
    """
    profile = profile_layout(
        layout_config(config), split_backward=splits_backward(config), is_sharded=PlanAxes(config).stage > 0
    )
    return memory_of(config, profile, stages_of(config, profile), on_cpu=on_cpu)


def memory_of(
    config: Config,
    profile: LayoutProfile,
    ranks: Sequence[RankStages],
    *,
    on_cpu: bool,
    times: float = 1.0,
    exact: bool = True,
) -> PlanMemory:
    """Return the memory of a plan whose layout has this profile.

    Args:
        config: the resolved config of the plan.
        profile: profile of its layout.
        ranks: stages of all pipeline ranks, or of some.
        on_cpu: see `colossus.planner.gradient_traffic.gradient_traffic`.
        times: samples of a microbatch over those of the profile; activations are scaled by it.
        exact: see `colossus.planner.optimizer_memory.OptimizerMemory.bytes`.
    """
    facts, axes = profile.facts, PlanAxes(config)
    memories: list[RankMemory] = []
    for rank in ranks:
        stored = stored_bytes(facts, config, rank, profile.optimizer, exact=exact)
        traffic = gradient_traffic(facts, config, rank, on_cpu=on_cpu)
        made, moved = _gradients(facts, config, axes, rank, traffic)
        play = MemoryPlay(
            profile.blocks, rank, traffic, stored, made, moved,
            scope=config.parallel.tensor.weights, first_trained=facts.first_trained, times=times,
        )  # fmt: skip
        memories.append(RankMemory(rank.rank, rank.stages, max(in_flight(rank.actions)), stored, play.run()))
    return PlanMemory(tuple(memories), tuple(_notes(config)))


def _gradients(
    facts: ModelFacts, config: Config, axes: PlanAxes, rank: RankStages, traffic: StepTraffic
) -> tuple[list[int], list[int]]:
    """Return, for each block, the bytes of gradients that stay in a step, and the part that goes into buckets.

    The block of a gradient is the last of the rank's blocks that use the parameter.
    """
    made, moved = [0] * len(facts.blocks), [0] * len(facts.blocks)
    units = sharded_units(facts, axes, rank)
    cut = {param.name for param in units.cut}
    is_zero = bool(config.parallel.zero.stage)
    own = {number for stage in rank.stages for number in rank.blocks_of(stage)}
    for param in units.every:
        kind = param.kind
        if not kind.is_trainable:
            continue
        block = max((number for number in param.blocks if number in own), default=max(own))
        is_cut = param.name in cut
        width = itemsize(kind.sharded[1] if is_cut else kind.gradient)
        made[block] += kind.elements * width
        if not (is_zero and is_cut) and kind.gradient == kind.reduced and axes.sums(kind.gradient_axes):
            moved[block] += kind.elements * width
    for gather in traffic.gathers:
        made[gather.block] -= gather.gradients
    return made, moved


def _notes(config: Config) -> list[str]:
    kind = config.parallel.data_strategy["type"]
    if kind in COUNTED_STRATEGIES:
        return []
    return [f"the strategy {name_of(kind)} needs more memory (copies of parameters, messages), which is not counted"]
