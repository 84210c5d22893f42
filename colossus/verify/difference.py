"""How far tensors of the two runs are apart, on which scale, and where most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from colossus.verify.verify_report import Finding

FLOOR = 1e-3
"""What is small against all of its kind is compared on the scale of this fraction of their common norm."""

SAME_FACTOR = 1e-6
"""How exactly all elements must share one factor for it to be called one."""


def difference_of(
    plan: Tensor, reference: Tensor, scale: float, at: Finding, comparable: Tensor | None = None
) -> Finding:
    """Compare tensors of one shape in float64, on the scale max(norm of ``reference``, ``scale``).

    Args:
        at: what is compared.
        comparable: mask of the elements that count, of the same shape; by default all do.
    """
    plan, reference = plan.double(), reference.double()
    difference = (plan - reference).abs()
    if comparable is not None:
        difference = difference.masked_fill(~comparable, 0.0)
    if not difference.numel():
        return at
    # equal infinities and two NaN in one place are no difference
    same = (plan == reference) | (plan.isnan() & reference.isnan())
    difference = difference.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    distance, scale = torch.linalg.vector_norm(difference).item(), max(norm_of([reference]), scale)
    index = torch.unravel_index(difference.argmax(), difference.shape)
    return replace(
        at,
        relative=distance / scale if scale else (math.inf if distance else 0.0),
        absolute=difference[index].item(),
        index=[int(number) for number in index],
        plan=plan[index].item(),
        reference=reference[index].item(),
    )


def difference_of_rows(plan: Tensor, reference: Tensor, tolerance: float, at: Finding) -> Finding:
    """Compare two `row_fingerprints`: the first row beyond the tolerance, else the one that is farthest off.

    A row is compared on the scale of its own norm, but at least of `FLOOR` times the largest row's.
    """
    difference = (plan - reference).abs().nan_to_num(nan=math.inf).amax(1)
    norms = reference[:, 0]
    relative = torch.where(difference == 0, 0.0, difference / norms.clamp(min=FLOOR * norms.max().item()))
    is_beyond = ~(relative <= tolerance)
    row = int((is_beyond.int() if is_beyond.any() else relative).argmax())
    values = plan[row, 0].item(), reference[row, 0].item()
    return replace(
        at,
        relative=relative[row].item(),
        absolute=difference[row].item(),
        sample=row,
        plan=values[0],
        reference=values[1],
    )


def factor_of(plan: Tensor, reference: Tensor) -> float | None:
    """The one factor between all elements of two tensors, None where there is none."""
    plan, reference = plan.double(), reference.double()
    square = reference.square().sum().item()
    factor = (plan * reference).sum().item() / square if square else math.nan
    rest = torch.linalg.vector_norm(plan - factor * reference).item()
    return factor if rest <= SAME_FACTOR * square**0.5 else None


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Common norm of the finite elements."""
    return math.sqrt(sum(each.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item() for each in tensors))
