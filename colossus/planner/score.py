"""The score of a plan: step time and memory without simulating the schedule, to choose which plans to estimate.

Four ranks of the pipeline are scored: the first, the last, the one whose blocks take longest, and the one whose blocks
save most. A step takes m
microbatches on the slowest of them, and a part of the wait at the ends of the pipeline, which is the time of a
microbatch on all other ranks. This part is 1 under 1F1B, 1/v with v chunks (2104.04473), and about 1/3 and 1/6 under
ZB-H1 and ZB-V, whose wgrads fill the wait (2401.10241).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from colossus.config import Config
from colossus.planner.layout_profile import LayoutProfile
from colossus.planner.memory import memory_of
from colossus.planner.plan_estimate import PlanMemory, RankMemory
from colossus.planner.plan_rank import PlanRank
from colossus.planner.plan_stages import RankStages, num_stages, stages_of, with_few_microbatches
from colossus.planner.step_timeline import RankTimeline, ranks_for
from colossus.planner.trace_seconds import TracePlayer, update_seconds
from colossus.schedule.actions import COMPUTE, Action
from colossus.schedule.bounds import split_chain


def split_by_time(config: Config, profile: LayoutProfile, player: TracePlayer) -> tuple[int, ...]:
    """Return the number of blocks of each stage that minimises the time of the slowest stage.

    Args:
        config: the resolved config of a plan with a pipeline.
        profile: profile of its layout.
        player: player of traces for the plan.

    Raises:
        ValueError: the model is no chain, or has fewer blocks than there are stages.
    """
    count = num_stages(config)
    profile.facts.bounds("parameters", count)  # raises if the model cannot be cut
    costs = tuple(round(1e9 * seconds) for seconds in block_seconds(profile, player))
    return tuple(stop - start for start, stop in itertools.pairwise(split_chain(costs, count)))


def block_seconds(profile: LayoutProfile, player: TracePlayer) -> Sequence[float]:
    """Return the seconds of each block for a microbatch, forward and backward."""
    return [player.play(block.forward).seconds + player.play(block.backward).seconds for block in profile.blocks]


@dataclass(frozen=True)
class Score:
    """The score of a plan.

    Attributes:
        seconds: approximate seconds of a step.
        memory: memory of the scored ranks, up to the first that does not fit.
    """

    seconds: float
    memory: PlanMemory


def score(config: Config, profile: LayoutProfile, player: TracePlayer, *, times: float, most: float) -> Score:
    """Score the plan of a resolved config.

    Args:
        config: the config.
        profile: profile of its layout, possibly with fewer samples of a microbatch.
        player: player of traces for the config's ranks and samples.
        times: samples of a microbatch over those of the profile.
        most: bytes of a device; a plan that needs more gets infinite seconds.

    Raises:
        ValueError: the schedule or the split does not fit the model.
    """
    ranks: list[PlanRank] = []
    memories: list[RankMemory] = []
    for stages in _some_ranks(config, profile, block_seconds(profile, player)):
        ranks += ranks_for(player, config, profile, [stages])
        memories += memory_of(config, profile, ranks[-1:], times=times, exact=False).ranks
        if memories[-1].total > most:
            return Score(float("inf"), PlanMemory(tuple(memories)))
    memory = PlanMemory(tuple(memories))
    lines = [RankTimeline(profile, rank, player) for rank in ranks]
    parameters = len(profile.facts.parameters) / config.parallel.pipeline.size
    update = max(update_seconds(player.hardware, rank.stored, parameters) for rank in memory.ranks)
    return Score(_seconds(config, lines) + update, memory)


def _seconds(config: Config, lines: list[RankTimeline]) -> float:
    slowest = last = behind = 0.0
    for line in lines:
        actions = _of_last_microbatches(line.stages)
        own = [sum(map(line.seconds, microbatch)) for microbatch in actions]
        slowest, last = max(slowest, own[0]), max(last, own[-1])
        behind = max(behind, *(cost.until_sent - cost.until_done for cost in map(line.cost, actions[-1])))
    begin, end = max(line.begin for line in lines), max(line.end for line in lines)
    return begin + slowest * (_microbatches(config) - 1) + last + behind + end


def seconds_by_count(config: Config, microbatch: float) -> float:
    """Return the seconds of a step in stages of equal time, without reductions of gradients.

    Args:
        config: the config.
        microbatch: seconds of a microbatch in all stages.
    """
    return microbatch / config.parallel.pipeline.size * _microbatches(config)


def _microbatches(config: Config) -> float:
    """Return the seconds of a step in microbatches of a stage, the wait at the ends of the pipeline included."""
    schedule = config.schedule
    share = {"zb-h1": 1 / 3, "zb-v": 1 / 6}.get(schedule.type, 1.0)
    if schedule.type == "interleaved":
        share = 1.0 / schedule.options.get("chunks", 2)
    return schedule.microbatches + (config.parallel.pipeline.size - 1) * share


def _of_last_microbatches(stages: RankStages) -> list[list[Action]]:
    """Return the computing actions of a rank's last microbatch but one, if there is one, and of the last one.

    A microbatch waits for gradients that are reduced after each; the rest is reduced beside the last.
    """
    count = 1 + max(action.microbatch for action in stages.actions if action.kind == "forward")
    computing = [action for action in stages.actions if action.kind in COMPUTE]
    return [[action for action in computing if action.microbatch == number] for number in range(count)[-2:]]


def _some_ranks(config: Config, profile: LayoutProfile, seconds_of_blocks: Sequence[float]) -> list[RankStages]:
    """Return the pipeline rank whose blocks save most, the first, the last, and the one whose blocks take longest."""
    size = config.parallel.pipeline.size
    ranks = stages_of(with_few_microbatches(config), profile.facts)
    seconds, saved = [0.0] * size, [0.0] * size
    for rank in ranks:
        blocks = [block for stage in rank.stages for block in rank.blocks_of(stage)]
        seconds[rank.rank] = sum(seconds_of_blocks[block] for block in blocks)
        saved[rank.rank] = rank.in_flight * sum(profile.blocks[block].saved for block in blocks)
    slowest, fullest = (max(range(size), key=values.__getitem__) for values in (seconds, saved))
    return [ranks[rank] for rank in dict.fromkeys((fullest, 0, size - 1, slowest))]
