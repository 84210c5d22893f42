"""Stages of a pipeline that take equally long: ``parallel.pipeline.split = "time"`` as numbers of blocks."""

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
    """Blocks of each stage, so that the stage whose microbatch takes longest takes as short as it can.

    Args:
        config: resolved, of a pipeline.

    Raises:
        ValueError: for a model that is no chain, and more stages than blocks.
    """
    num_stages = len(placement(actions_of(config)))
    profile.facts.bounds("parameters", num_stages)  # which raises
    costs = tuple(round(1e9 * seconds) for seconds in block_seconds(profile, player))
    return tuple(stop - start for start, stop in itertools.pairwise(split_chain(costs, num_stages)))


def block_seconds(profile: LayoutProfile, player: TracePlayer) -> Sequence[float]:
    """Of a microbatch, forward and backward, of each block."""
    return [player.play(block.forward).seconds + player.play(block.backward).seconds for block in profile.blocks]
