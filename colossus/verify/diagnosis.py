"""What a difference looks like: on which ranks' shards it is, and whether a sum was taken too often or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from colossus.context.grid import RankGrid
from colossus.verify.difference import Difference
from colossus.verify.records import ParameterInfo

SAME_FACTOR = 1e-6
"""How exactly all elements must share one factor for it to be called one."""

FLOAT32 = 1e-5
"""Relative differences below this are of the size of float32 rounding."""


def of_values(
    plan: Tensor, reference: Tensor, info: ParameterInfo, grid: RankGrid, scale: float, *, is_sum: bool = False
) -> list[str]:
    """What tells the two full tensors of a parameter or a gradient apart.

    Args:
        scale: differences above it count.
        is_sum: the values are gradients, which are summed over ranks.
    """
    ranks = _ranks_that_differ(plan, reference, info, grid, scale)
    lines = []
    wrong = torch.ones_like(plan, dtype=torch.bool)
    if ranks and len(ranks) < len(_holders(info, grid)):
        lines.append(f"only the shard of {' and '.join(describe_rank(rank, grid) for rank in ranks)} differs")
        wrong = torch.zeros_like(wrong)
        for rank in ranks:
            wrong[_box(rank, info, grid)] = True
    factor = _factor(plan[wrong].double(), reference[wrong].double())
    if factor is not None:
        where = "there" if lines else "everywhere"
        lines.append(
            f"it is {factor:.6g} times that of one process {where}{_sizes(factor, info, grid) if is_sum else ''}"
        )
    return lines


def of_size(difference: Difference) -> list[str]:
    """Whether the difference is as small as if something had been computed in float32."""
    if difference.relative < FLOAT32:
        return [
            "the difference is of the size of float32 rounding: something may compute in float32 in both runs "
            "(.float(), a constant made with dtype=torch.float32)"
        ]
    return []


def _ranks_that_differ(plan: Tensor, reference: Tensor, info: ParameterInfo, grid: RankGrid, scale: float) -> list[int]:
    difference = (plan.double() - reference.double()).abs().nan_to_num(nan=torch.inf)
    return [rank for rank in _holders(info, grid) if (difference[_box(rank, info, grid)] > scale).any()]


def _holders(info: ParameterInfo, grid: RankGrid) -> list[int]:
    """The first rank that holds each shard of the parameter."""
    shard = {axis for axis in info.layout.shard_axes if grid.sizes[axis] > 1}
    first = {axis: info.pipeline_ranks[0] if axis == "pipeline" else 0 for axis in grid.names if axis not in shard}
    ranks = [rank for rank in range(grid.world_size) if first.items() <= grid.coordinates(rank).items()]
    return [rank for rank in ranks if info.layout.owns(grid.coordinates(rank), sorted(shard))]


def _box(rank: int, info: ParameterInfo, grid: RankGrid) -> tuple[slice, ...]:
    box = info.layout.box(info.shape, grid.sizes, grid.coordinates(rank))
    return tuple(slice(start, stop) for start, stop in box)


def _factor(plan: Tensor, reference: Tensor) -> float | None:
    square = reference.square().sum().item()
    if not square:
        return None
    factor = (plan * reference).sum().item() / square
    rest = torch.linalg.vector_norm(plan - factor * reference).item()
    return factor if rest <= SAME_FACTOR * square**0.5 else None


def _sizes(factor: float, info: ParameterInfo, grid: RankGrid) -> str:
    """Which axes have as many ranks as the factor, or one over it, says."""
    if factor <= 0:
        return ""
    times = factor if factor > 1 else 1 / factor
    sizes = {**grid.sizes, "pipeline": len(info.pipeline_ranks)}  # stages that share it sum over themselves
    axes = [axis for axis, size in sizes.items() if size > 1 and abs(times - size) < 1e-3]
    if not axes:
        return ""
    what = "a sum over it too many" if factor > 1 else "a sum over it is missing, or a mean taken in its place"
    return f" ({times:.0f} is the size of {' and of '.join(axes)}: {what}?)"


def describe_rank(rank: int, grid: RankGrid) -> str:
    """``rank 1 (data 0, tensor 1)``."""
    at = grid.where(rank)
    return f"rank {rank} ({at})"


def describe_stages(stages: Iterable[int], rank_of: Mapping[int, int], grid: RankGrid) -> list[str]:
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
        lines.append(f"on {describe_stage(stage, rank_of)}: rank{plural} {first_names(ranks, 8)} (pipeline {index})")
    return lines


def describe_stage(stage: int, rank_of: Mapping[int, int]) -> str:
    """``stage 3 (of 0 to 3)``."""
    return f"stage {stage} (of 0 to {max(rank_of)})"


def first_names(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
