"""How far two tensors are apart, on which scale, and where most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-3
"""A tensor that is small against all of its kind is compared on the scale of this fraction of their common norm."""

SMALL, NOISE = 1e-6, 1e-9
"""An element of a gradient below `SMALL` of its parameter's root mean square, or below `NOISE` of that of all
gradients, may be rounding for the most part."""

AS_FAR = 1 - 1e-3
"""Of places whose differences are this close the first is named: rounding, which is not the same each time, would
choose among them."""


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors of one shape, or of two numbers.

    Attributes:
        relative: norm of the difference over the scale; infinite when one side is not finite or has another shape.
        absolute: the largest difference of an element.
        index: where that is.
        plan, reference: the values there.
    """

    relative: float
    absolute: float = 0.0
    index: tuple[int, ...] = ()
    plan: float = math.nan
    reference: float = math.nan


def difference_of(plan: Tensor, reference: Tensor, scale: float, comparable: Tensor | None = None) -> Difference:
    """Compare in float64 on the scale max(norm of ``reference``, ``scale``).

    Args:
        plan, reference: one shape, any dtype.
        comparable: mask of the elements that count, of the same shape; by default all do.
    """
    plan, reference = plan.double(), reference.double()
    difference = (plan - reference).abs()
    if comparable is not None:
        difference = difference.masked_fill(~comparable, 0.0)
    if not difference.numel():
        return Difference(0.0)
    # equal infinities and two NaN in one place are no difference
    same = (plan == reference) | (plan.isnan() & reference.isnan())
    difference = difference.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(difference.argmax())
    index = tuple(int(number) for number in torch.unravel_index(torch.tensor(place), difference.shape))
    distance = torch.linalg.vector_norm(difference).item()
    scale = max(norm_of([reference]), scale)
    relative = distance / scale if scale else (math.inf if distance else 0.0)
    return Difference(relative, difference[index].item(), index, plan[index].item(), reference[index].item())


def difference_of_numbers(plan: float, reference: float) -> Difference:
    """Two numbers, on the scale of the second."""
    difference = abs(plan - reference)
    if not math.isfinite(difference):
        return Difference(0.0 if plan == reference else math.inf, difference, (), plan, reference)
    return Difference(
        difference / abs(reference) if reference else (math.inf if difference else 0.0), difference, (), plan, reference
    )


def first_of_the_largest(relative: Tensor) -> int:
    """The place in [n] of the first of the largest differences (`AS_FAR`); what is not a number is larger than all."""
    relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
    return int((relative >= AS_FAR * relative.max()).int().argmax())


def difference_of_fingerprints(plan: Tensor, reference: Tensor) -> tuple[Difference, int]:
    """Compare two `row_fingerprints`, [rows, 2]: the difference of the worst row (`AS_FAR`), and that row's number.

    A row is compared on the scale of its own norm, but at least of `FLOOR` times the largest row's. A fingerprint does
    not know which element differs: ``index`` is empty, and ``plan`` and ``reference`` are the norms of the row.
    """
    difference = (plan - reference).abs().nan_to_num(nan=math.inf).amax(1)
    norms = reference[:, 0]
    scale = norms.clamp(min=FLOOR * norms.max().item())
    relative = torch.where(difference == 0, 0.0, difference / scale)
    row = first_of_the_largest(relative)
    return Difference(
        relative[row].item(), difference[row].item(), (), plan[row, 0].item(), reference[row, 0].item()
    ), row


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Common norm of the finite elements."""
    squares = [tensor.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item() for tensor in tensors]
    return math.sqrt(sum(squares))


class ComparableWeights:
    """Which weights can be compared after optimizer steps.

    The optimizer of the config takes the steps, since it must not depend on the plan either: one that computes with a
    full parameter (a norm, a factorisation) is wrong on a rank's shard. Where a true gradient is zero
    (a key bias of attention: softmax ignores it) both runs hold rounding noise, which Adam and the like turn into
    larger steps, and a sign into full ones. So weights whose gradient was noise at some step (`SMALL`, `NOISE`) are
    left out, unless it was exactly zero in both runs. Losses, outputs and gradients of later steps stay comparable: a
    weight without a gradient is one on which the loss does not depend.
    """

    def __init__(self) -> None:
        self._masks: dict[str, Tensor] = {}

    def update(self, plan: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
        """Exclude what was noise among the gradients of one step."""
        count = sum(grad.numel() for grad in reference.values())
        of_all = NOISE * norm_of(reference.values()) / math.sqrt(max(count, 1))
        for name, grad in reference.items():
            limit = max(SMALL * norm_of([grad]) / math.sqrt(max(grad.numel(), 1)), of_all)
            other = plan.get(name)
            idle = (grad == 0) & (other == 0) if other is not None else grad == 0
            clear = (grad.abs() >= limit) | idle
            self._masks[name] = self._masks[name] & clear if name in self._masks else clear

    def mask(self, name: str) -> Tensor | None:
        """Which elements of a parameter are compared; None for one without a gradient, of which all are."""
        return self._masks.get(name)

    @property
    def num_left_out(self) -> int:
        """Weights that are not compared."""
        return sum(int((~mask).sum()) for mask in self._masks.values())
