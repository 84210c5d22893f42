"""How far two tensors are apart, on which scale, and where most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-3
"""A tensor that is small against all tensors of its kind is compared on this part of their common norm."""

SMALL, NOISE = 1e-6, 1e-9
"""An element of a gradient below `SMALL` of its parameter's root mean square, or below `NOISE` of that of all
gradients, may be rounding for the most part."""


@dataclass(frozen=True)
class Gap:
    """The difference of two tensors of one shape, or of two numbers.

    Attributes:
        relative: norm of the difference over the scale; infinite when one side is not finite or has another shape.
        absolute: the largest difference of an element.
        index: where that is.
        plan, alone: the values there.
    """

    relative: float
    absolute: float = 0.0
    index: tuple[int, ...] = ()
    plan: float = math.nan
    alone: float = math.nan


def gap_of(plan: Tensor, alone: Tensor, scale: float, trusted: Tensor | None = None) -> Gap:
    """Compare in float64 on the scale max(norm of ``alone``, ``scale``).

    Args:
        plan, alone: any one shape and dtype.
        trusted: elements that count; by default all.
    """
    plan, alone = plan.double(), alone.double()
    difference = (plan - alone).abs()
    if trusted is not None:
        difference = difference.masked_fill(~trusted, 0.0)
    if not difference.numel():
        return Gap(0.0)
    # equal infinities and two NaN in one place are no difference
    same = (plan == alone) | (plan.isnan() & alone.isnan())
    difference = difference.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(difference.argmax())
    index = tuple(int(number) for number in torch.unravel_index(torch.tensor(place), difference.shape))
    distance = torch.linalg.vector_norm(difference).item()
    scale = max(norm_of([alone]), scale)
    relative = distance / scale if scale else (math.inf if distance else 0.0)
    return Gap(relative, difference[index].item(), index, plan[index].item(), alone[index].item())


def gap_of_numbers(plan: float, alone: float) -> Gap:
    """Two numbers, on the scale of the second."""
    difference = abs(plan - alone)
    if not math.isfinite(difference):
        return Gap(0.0 if plan == alone else math.inf, difference, (), plan, alone)
    return Gap(difference / abs(alone) if alone else (math.inf if difference else 0.0), difference, (), plan, alone)


def gap_of_rows(plan: Tensor, alone: Tensor) -> tuple[Gap, int]:
    """Two `row_prints`; the worst row's gap (index empty: a print does not know it), and the row.

    A row is compared on the scale of its own norm, or of a small part of the largest row's. ``plan`` and ``alone`` of
    the gap are norms.
    """
    difference = (plan - alone).abs().nan_to_num(nan=math.inf).amax(1)
    norms = alone[:, 0]
    scale = norms.clamp(min=FLOOR * norms.max().item())
    relative = torch.where(difference == 0, 0.0, difference / scale)
    row = int(relative.argmax())
    return Gap(relative[row].item(), difference[row].item(), (), plan[row, 0].item(), alone[row, 0].item()), row


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Common norm of the finite elements."""
    squares = [tensor.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item() for tensor in tensors]
    return math.sqrt(sum(squares))


class Trust:
    """Which weights can be compared after optimizer steps.

    The optimizer of the config takes the steps, since it is part of what must not depend on the plan: one that
    computes with a whole parameter (a norm, a factorisation) is wrong on a rank's part. Where a true gradient is zero
    (a key bias of attention: softmax ignores it) both runs hold rounding noise, which Adam and the like turn into
    larger steps, and a sign into full ones. So weights whose gradient was noise at some step (`SMALL`, `NOISE`) are
    left out, unless it was exactly zero in both runs. Losses, outputs and gradients of later steps stay comparable: a
    weight without a gradient is one on which the loss does not depend.
    """

    def __init__(self) -> None:
        self._trusted: dict[str, Tensor] = {}

    def learn(self, plan: dict[str, Tensor], alone: dict[str, Tensor]) -> None:
        """Take in the gradients of one step."""
        count = sum(grad.numel() for grad in alone.values())
        of_all = NOISE * norm_of(alone.values()) / math.sqrt(max(count, 1))
        for name, grad in alone.items():
            limit = max(SMALL * norm_of([grad]) / math.sqrt(max(grad.numel(), 1)), of_all)
            other = plan.get(name)
            idle = (grad == 0) & (other == 0) if other is not None else grad == 0
            clear = (grad.abs() >= limit) | idle
            self._trusted[name] = self._trusted[name] & clear if name in self._trusted else clear

    def of(self, name: str) -> Tensor | None:
        """The mask of a parameter; None for what has no gradient, and is compared as a whole."""
        return self._trusted.get(name)

    @property
    def left_out(self) -> int:
        """Weights that are not compared."""
        return sum(int((~trusted).sum()) for trusted in self._trusted.values())
