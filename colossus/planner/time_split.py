"""Pipeline stages of equal time: ``parallel.pipeline.split = "time"`` as numbers of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from colossus.config import Config
from colossus.planner.layout_blocks import LayoutProfile
from colossus.planner.plan_stages import actions_of
from colossus.planner.trace_seconds import TracePlayer
from colossus.schedule.actions import placement
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
    num_stages = len(placement(actions_of(config)))
    profile.facts.bounds("parameters", num_stages)  # raises if the model cannot be cut
    costs = tuple(round(1e9 * seconds) for seconds in block_seconds(profile, player))
    return tuple(stop - start for start, stop in itertools.pairwise(split_chain(costs, num_stages)))


def block_seconds(profile: LayoutProfile, player: TracePlayer) -> Sequence[float]:
    """Return the seconds of each block for a microbatch, forward and backward."""
    return [player.play(block.forward).seconds + player.play(block.backward).seconds for block in profile.blocks]
