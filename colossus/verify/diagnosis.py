"""What a difference looks like: on which ranks' parts it is, and whether a sum was taken too often or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.context.grid import RankGrid
from colossus.verify.describe import who
from colossus.verify.difference import Gap
from colossus.verify.records import ParameterFacts

SAME_FACTOR = 1e-6
"""How exactly all elements must share one factor for it to be called one."""

FLOAT32 = 1e-5
"""Relative differences below this are of the size of float32 rounding."""


def of_values(
    plan: Tensor, alone: Tensor, facts: ParameterFacts, grid: RankGrid, scale: float, *, is_sum: bool = False
) -> list[str]:
    """Clues from the two whole tensors of a parameter or a gradient.

    Args:
        scale: differences above it count.
        is_sum: the values are gradients, which are summed over ranks.
    """
    ranks = _ranks_that_differ(plan, alone, facts, grid, scale)
    clues = []
    wrong = torch.ones_like(plan, dtype=torch.bool)
    if ranks and len(ranks) < len(_holders(facts, grid)):
        clues.append(f"only the part of {' and '.join(who(rank, grid) for rank in ranks)} differs")
        wrong = torch.zeros_like(wrong)
        for rank in ranks:
            wrong[_part(rank, facts, grid)] = True
    factor = _factor(plan[wrong].double(), alone[wrong].double())
    if factor is not None:
        where = "there" if clues else "everywhere"
        clues.append(
            f"it is {factor:.6g} times that of one process {where}{_sizes(factor, facts, grid) if is_sum else ''}"
        )
    return clues


def of_size(gap: Gap) -> list[str]:
    """Whether the difference is as small as if something had been computed in float32."""
    if gap.relative < FLOAT32:
        return [
            "the difference is of the size of float32 rounding: something may compute in float32 in both runs "
            "(.float(), a constant made with dtype=torch.float32)"
        ]
    return []


def _ranks_that_differ(plan: Tensor, alone: Tensor, facts: ParameterFacts, grid: RankGrid, scale: float) -> list[int]:
    difference = (plan.double() - alone.double()).abs().nan_to_num(nan=torch.inf)
    return [rank for rank in _holders(facts, grid) if (difference[_part(rank, facts, grid)] > scale).any()]


def _holders(facts: ParameterFacts, grid: RankGrid) -> list[int]:
    """The first rank that holds each part of the parameter."""
    shard = {axis for axis in facts.layout.shard_axes if grid.sizes[axis] > 1}
    home = {axis: facts.pipeline_ranks[0] if axis == "pipeline" else 0 for axis in grid.names if axis not in shard}
    return [rank for rank in range(grid.world_size) if home.items() <= grid.coordinates(rank).items()]


def _part(rank: int, facts: ParameterFacts, grid: RankGrid) -> tuple[slice, ...]:
    box = facts.layout.box(facts.shape, grid.sizes, grid.coordinates(rank))
    return tuple(slice(start, stop) for start, stop in box)


def _factor(plan: Tensor, alone: Tensor) -> float | None:
    square = alone.square().sum().item()
    if not square:
        return None
    factor = (plan * alone).sum().item() / square
    rest = torch.linalg.vector_norm(plan - factor * alone).item()
    return factor if rest <= SAME_FACTOR * square**0.5 else None


def _sizes(factor: float, facts: ParameterFacts, grid: RankGrid) -> str:
    """Which axes have as many ranks as the factor, or one over it, says."""
    if factor <= 0:
        return ""
    times = factor if factor > 1 else 1 / factor
    sizes = {**grid.sizes, "pipeline": len(facts.pipeline_ranks)}  # stages that share it sum over themselves
    axes = [axis for axis, size in sizes.items() if size > 1 and abs(times - size) < 1e-3]
    if not axes:
        return ""
    what = "a sum over it too many" if factor > 1 else "a sum over it is missing, or a mean taken in its place"
    return f" ({times:.0f} is the size of {' and of '.join(axes)}: {what}?)"
