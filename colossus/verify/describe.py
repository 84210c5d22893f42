"""Where something is, in words: ranks with their coordinates, stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from colossus.context.grid import RankGrid


def who(rank: int, grid: RankGrid) -> str:
    """``rank 1 (data 0, tensor 1)``."""
    at = ", ".join(f"{axis} {index}" for axis, index in grid.coordinates(rank).items() if grid.sizes[axis] > 1)
    return f"rank {rank} ({at})"


def on_stages(stages: Iterable[int], rank_of: Mapping[int, int], grid: RankGrid) -> list[str]:
    """For each stage ``on stage 3 (of 0 to 3): ranks 0, 1 (pipeline 0)``; nothing without a pipeline.

    Args:
        rank_of: all stages -> pipeline rank.
    """
    if len(rank_of) == 1:
        return []
    lines = []
    for stage in stages:
        index = rank_of[stage]
        ranks = [str(rank) for rank in range(grid.world_size) if grid.index(rank, "pipeline") == index]
        plural = "s" if len(ranks) > 1 else ""
        lines.append(f"on {place_in(stage, rank_of)}: rank{plural} {some(ranks, 8)} (pipeline {index})")
    return lines


def place_in(stage: int, rank_of: Mapping[int, int]) -> str:
    """``stage 3 (of 0 to 3)``."""
    return f"stage {stage} (of 0 to {max(rank_of)})"


def some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
