"""The predicted memory of a plan, by kind, without a process or a device.

All ranks with the same index along the pipeline hold equally much (shards are padded to equal sizes), so that one of
them stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from colossus.config import Config
from colossus.config.plans import name_of
from colossus.planner.layout_blocks import LayoutProfile
from colossus.planner.layout_profile import profile_layout
from colossus.planner.parameter_facts import itemsize
from colossus.planner.plan_stages import layout_config, stages_of
from colossus.planner.rank_memory import PlanMemory, RankMemory
from colossus.planner.rank_stages import RankStages
from colossus.planner.stage_activations import StageActivations, peak_of_step
from colossus.planner.stored import stored_bytes
from colossus.schedule.actions import in_flight

#: strategies whose memory is counted completely: beside buckets they store nothing that grows with the model
COUNTED_STRATEGIES = ("all_reduce", "zero", "hierarchical")


def predict_memory(config: Config) -> PlanMemory:
    """Predict the memory of a resolved config's plan.

    Raises:
        ConfigError: see `colossus.planner.layout_profile.profile_layout` and
            `colossus.planner.plan_stages.stages_of`.
    """
    profile = profile_layout(layout_config(config))
    return memory_of(config, profile, stages_of(config, profile))


def memory_of(
    config: Config, profile: LayoutProfile, ranks: Sequence[RankStages], *, times: float = 1.0, exact: bool = True
) -> PlanMemory:
    """Return the memory of a plan whose layout has this profile.

    Args:
        config: the resolved config of the plan.
        profile: profile of its layout.
        ranks: stages of all pipeline ranks, or of some.
        times: samples of a microbatch over those of the profile; activations are scaled by it.
        exact: see `colossus.planner.optimizer_memory.OptimizerMemory.bytes`.
    """
    accumulates = config.schedule.microbatches > 1
    memories: list[RankMemory] = []
    for rank in ranks:
        stored = stored_bytes(profile.facts, config, rank, profile.optimizer, accumulates=accumulates, exact=exact)
        grown = 0 if accumulates else stored.gradients
        stages = _stages(profile, rank, 0 if config.parallel.zero.stage == 3 else grown)
        activations = max(0, round(times * peak_of_step(rank.actions, stages)) - grown)
        if config.parallel.pipeline.size > 1:
            activations += 2 * round(times * max(stages[stage].passed for stage in rank.stages))
        memories.append(RankMemory(rank.rank, rank.stages, max(in_flight(rank.actions)), stored, activations))
    return PlanMemory(tuple(memories), tuple(_notes(config)))


def _stages(profile: LayoutProfile, rank: RankStages, grown: int) -> dict[int, StageActivations]:
    """Return the activations of a rank's stages.

    Args:
        profile: profile of the layout.
        rank: stages of the rank.
        grown: bytes of gradients that backward allocates while activations are freed, shared out over the blocks by
            their parameters.
    """
    params = [param for param in profile.facts.parameters if param.kind.is_trainable]
    sizes = [0] * len(profile.blocks)
    for param in params:
        sizes[param.blocks[-1]] += param.kind.elements
    numbers = [number for stage in rank.stages for number in rank.blocks_of(stage)]
    bytes_per_element = grown / max(1, sum(sizes[number] for number in numbers))
    tied = [param for param in params if len(param.blocks) > 1]
    stages, last = {}, len(rank.bounds) - 2
    for stage in rank.stages:
        of_stage = rank.blocks_of(stage)
        blocks = [profile.blocks[number] for number in of_stage]
        made = [round(bytes_per_element * sum(sizes[number + 1 : of_stage.stop])) for number in of_stage]
        # The profile ran one backward, so that a block's peak includes gradients of tied parameters of later stages.
        for at, number in enumerate(of_stage):
            later = [param for param in tied if param.blocks[0] <= number and param.blocks[-1] >= of_stage.stop]
            made[at] -= sum(param.kind.elements * itemsize(param.kind.gradient) for param in later)
        received = profile.blocks[of_stage.start - 1].passed if stage else 0
        stages[stage] = StageActivations.of(blocks, received, made, is_last=stage == last)
    return stages


def _notes(config: Config) -> list[str]:
    kind = config.parallel.data_strategy["type"]
    if kind in COUNTED_STRATEGIES:
        return []
    return [f"the strategy {name_of(kind)} needs more memory (copies of parameters, messages), which is not counted"]
