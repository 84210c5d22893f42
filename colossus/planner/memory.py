"""The memory of a plan, predicted: of the fullest rank of each pipeline rank, by kind, without a process or a device.

All ranks of one pipeline rank hold as much (shards are padded to equal sizes), so one of each is looked at.
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

#: strategies that keep nothing of a model's size but buckets
COUNTED_STRATEGIES = ("all_reduce", "zero", "hierarchical")


def predict_memory(config: Config) -> PlanMemory:
    """The memory of a resolved config's plan.

    Raises:
        ConfigError: see `colossus.planner.layout_profile.profile_layout` and
            `colossus.planner.plan_stages.stages_of`.
    """
    profile = profile_layout(layout_config(config))
    return memory_of(config, profile, stages_of(config, profile))


def memory_of(
    config: Config, profile: LayoutProfile, ranks: Sequence[RankStages], *, times: float = 1.0, exact: bool = True
) -> PlanMemory:
    """The memory of a plan whose layout has this profile.

    Args:
        times: how many times the samples of the profile a microbatch has; activations are taken to be as many times as
            large.
        ranks: of the pipeline, all or some.
        exact: see `colossus.planner.optimizer_memory.OptimizerMemory.bytes`.
    """
    accumulates = config.schedule.microbatches > 1
    found: list[RankMemory] = []
    for rank in ranks:
        stored = stored_bytes(profile.facts, config, rank, profile.optimizer, accumulates=accumulates, exact=exact)
        grown = 0 if accumulates else stored.gradients
        stages = _stages(profile, rank, 0 if config.parallel.zero.stage == 3 else grown)
        activations = max(0, round(times * peak_of_step(rank.actions, stages)) - grown)
        if config.parallel.pipeline.size > 1:
            activations += 2 * round(times * max(stages[stage].passed for stage in rank.stages))
        found.append(RankMemory(rank.rank, rank.stages, max(in_flight(rank.actions)), stored, activations))
    return PlanMemory(tuple(found), tuple(_notes(config)))


def _stages(profile: LayoutProfile, rank: RankStages, grown: int) -> dict[int, StageActivations]:
    """Of a rank's stages.

    Args:
        grown: bytes of gradients that are made in backward, while activations go: shared out over the blocks by their
            parameters.
    """
    params = [one for one in profile.facts.parameters if one.kind.is_trainable]
    sizes = [0] * len(profile.blocks)
    for one in params:
        sizes[one.blocks[-1]] += one.kind.elements
    numbers = [number for stage in rank.stages for number in rank.blocks_of(stage)]
    each = grown / max(1, sum(sizes[number] for number in numbers))
    tied = [one for one in params if len(one.blocks) > 1]
    found, last = {}, len(rank.bounds) - 2
    for stage in rank.stages:
        of_stage = rank.blocks_of(stage)
        blocks = [profile.blocks[number] for number in of_stage]
        made = [round(each * sum(sizes[number + 1 : of_stage.stop])) for number in of_stage]
        for at, number in enumerate(of_stage):  # what the profile's one backward holds of later stages
            apart = [one for one in tied if one.blocks[0] <= number and one.blocks[-1] >= of_stage.stop]
            made[at] -= sum(one.kind.elements * itemsize(one.kind.gradient) for one in apart)
        given = profile.blocks[of_stage.start - 1].passed if stage else 0
        found[stage] = StageActivations.of(blocks, given, made, is_last=stage == last)
    return found


def _notes(config: Config) -> list[str]:
    kind = config.parallel.data_strategy["type"]
    if kind in COUNTED_STRATEGIES:
        return []
    return [f"what the strategy {name_of(kind)} keeps itself (copies of parameters, messages) is not counted"]
