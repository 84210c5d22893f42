"""The memory of a plan, predicted: of the fullest rank of each pipeline rank, by kind, without a process or a device.

All ranks of one pipeline rank hold as much (shards are padded to equal sizes), so one of each is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from colossus.config import Config
from colossus.config.plans import name_of
from colossus.planner.layout_blocks import LayoutProfile
from colossus.planner.layout_profile import profile_layout
from colossus.planner.plan_stages import layout_config, stages_of
from colossus.planner.rank_memory import PlanMemory, RankMemory
from colossus.planner.rank_stages import RankStages
from colossus.planner.stage_activations import StageActivations, peak_of_step
from colossus.planner.stored import stored_bytes
from colossus.schedule.actions import in_flight

#: strategies that keep nothing of a model's size but buckets
_COUNTED_STRATEGIES = ("all_reduce", "zero", "hierarchical")


def predict_memory(config: Config) -> PlanMemory:
    """The memory of a resolved config's plan.

    Raises:
        ConfigError: see `colossus.planner.layout_profile.profile_layout` and
            `colossus.planner.plan_stages.stages_of`.
    """
    profile = profile_layout(layout_config(config))
    return memory_of(config, profile, stages_of(config, profile))


def memory_of(config: Config, profile: LayoutProfile, ranks: Sequence[RankStages]) -> PlanMemory:
    """The memory of a plan whose layout has this profile.

    Args:
        ranks: of the pipeline.
    """
    accumulates = config.schedule.microbatches > 1
    stages = _stages(profile, ranks[0].bounds)
    found: list[RankMemory] = []
    for rank in ranks:
        stored = stored_bytes(profile.facts, config, rank, accumulates=accumulates)
        activations = peak_of_step(rank.actions, stages)
        if len(ranks) > 1:
            activations += 2 * max(stages[stage].passed for stage in rank.stages)
        found.append(RankMemory(rank.rank, rank.stages, max(in_flight(rank.actions)), stored, activations))
    return PlanMemory(tuple(found), tuple(_notes(config)))


def _stages(profile: LayoutProfile, bounds: Sequence[int]) -> dict[int, StageActivations]:
    found, given, last = {}, 0, len(bounds) - 2
    for stage in range(last + 1):
        blocks = profile.blocks[bounds[stage] : bounds[stage + 1]]
        found[stage] = StageActivations.of(blocks, given, is_last=stage == last)
        given = blocks[-1].passed
    return found


def _notes(config: Config) -> list[str]:
    kind = config.parallel.data_strategy["type"]
    if kind in _COUNTED_STRATEGIES:
        return []
    return [f"what the strategy {name_of(kind)} keeps itself (copies of parameters, messages) is not counted"]
