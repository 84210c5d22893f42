"""A plan's step and memory without playing its schedule: which of many plans are worth an estimate.

Three ranks of the pipeline are looked at: the first, the last, and the one whose blocks take longest. A step is m
microbatches of the slowest of them, and what the schedule leaves of the wait at the ends of a pipeline, the seconds of
a microbatch on all other ranks: all of it under 1F1B, 1/v with v chunks (2104.04473), about a third and a sixth of
zero-bubble schedules, whose gradients of weights fill it (2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from colossus.config import Config
from colossus.planner.layout_blocks import LayoutProfile
from colossus.planner.memory import memory_of
from colossus.planner.rank_memory import PlanMemory
from colossus.planner.rank_stages import RankStages
from colossus.planner.step_timeline import RankTimeline
from colossus.planner.time_split import block_seconds
from colossus.planner.trace_seconds import TracePlayer, update_seconds
from colossus.registry import SCHEDULES
from colossus.schedule.actions import LAST_USE, Action, Actions, placement


@dataclass(frozen=True)
class Score:
    """Of a plan.

    Attributes:
        seconds: of a step, roughly.
        memory: of the ranks that were looked at.
    """

    seconds: float
    memory: PlanMemory


def score(config: Config, profile: LayoutProfile, player: TracePlayer, *, times: float, most: float) -> Score:
    """Of a resolved config whose layout has this profile, but for the samples of a microbatch.

    Args:
        player: for so many times the samples of the profile.
        times: as above.
        most: bytes of a device. Of a plan that needs more only memory is known, its seconds are infinite.

    Raises:
        ValueError: for a schedule or a split that does not fit the model.
    """
    ranks = _some_ranks(config, profile, block_seconds(profile, player))
    memory = memory_of(config, profile, ranks, times=times, exact=False)
    if memory.fullest.total > most:
        return Score(float("inf"), memory)
    lines = [RankTimeline.of(config, profile, rank, player) for rank in ranks]
    parameters = len(profile.facts.parameters) / config.parallel.pipeline.size
    update = max(update_seconds(player.hardware, rank.stored, parameters) for rank in memory.ranks)
    return Score(_seconds(config, lines) + update, memory)


def _seconds(config: Config, lines: list[RankTimeline]) -> float:
    slowest, behind = 0.0, 0.0
    for line in lines:
        each = last = 0.0
        for action in _of_one_microbatch(line.stages):
            cost = line.cost(action)
            each += cost.until_done
            last = max(last, cost.until_sent - cost.until_done)
        slowest, behind = max(slowest, each), max(behind, last)
    begin, end = max(line.begin for line in lines), max(line.end for line in lines)
    return begin + slowest * _microbatches(config) + behind + end


def seconds_of_microbatch(profile: LayoutProfile, player: TracePlayer) -> float:
    """Forward and backward of all blocks."""
    return sum(block_seconds(profile, player))


def seconds_by_count(config: Config, microbatch: float) -> float:
    """Of a step of so many seconds a microbatch, in stages of equal time, without what is sent of gradients."""
    return microbatch / config.parallel.pipeline.size * _microbatches(config)


def _microbatches(config: Config) -> float:
    """How many a rank could do in a step without its waits."""
    return config.schedule.microbatches + (config.parallel.pipeline.size - 1) * _share_of_wait(config)


def _share_of_wait(config: Config) -> float:
    kind = config.schedule.type
    if kind == "interleaved":
        return 1.0 / float(config.schedule.options.get("chunks", 2))
    return {"zb-h1": 1 / 3, "zb-v": 1 / 6}.get(kind, 1.0)


def _of_one_microbatch(stages: RankStages) -> list[Action]:
    """The last microbatch on a rank: with its gradients."""
    last = max(action.microbatch for action in stages.actions if action.kind == "forward")
    kinds = ("forward", "backward", "backward_input", "backward_weight")
    return [action for action in stages.actions if action.kind in kinds and action.microbatch == last]


def _some_ranks(config: Config, profile: LayoutProfile, of_blocks: Sequence[float]) -> list[RankStages]:
    schedule, size = config.schedule, config.parallel.pipeline.size
    few = min(schedule.microbatches, 2 * size)
    actions, rank_of = _compute_actions(schedule.type, size, few, tuple(sorted(schedule.options.items())))
    bounds = profile.facts.bounds(config.parallel.pipeline.split, len(rank_of))
    seconds = [0.0] * size
    for stage, rank in rank_of.items():
        seconds[rank] += sum(of_blocks[bounds[stage] : bounds[stage + 1]])
    slowest = max(range(size), key=seconds.__getitem__)
    return [RankStages(rank, bounds, rank_of, actions[rank]) for rank in sorted({0, slowest, size - 1})]


@lru_cache(maxsize=1024)
def _compute_actions(
    kind: Any, stages: int, microbatches: int, options: tuple[tuple[str, Any], ...]
) -> tuple[Actions, dict[int, int]]:
    """Of all ranks, each stage reduced behind its last action; and stage -> rank."""
    schedule = SCHEDULES.get(kind) if isinstance(kind, str) else kind
    lists: Actions = schedule(stages, microbatches, **dict(options))
    found: Actions = []
    for own in lists:
        last = {action.stage: index for index, action in enumerate(own) if action.kind in LAST_USE}
        done: list[Action] = []
        for index, action in enumerate(own):
            done.append(action)
            if last.get(action.stage) == index:
                done.append(Action("reduce", action.stage))
        found.append(done)
    return found, placement(found) or {0: 0}
