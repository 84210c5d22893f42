"""Logits of which a rank holds some rows and some columns, with the labels of its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.layers.sharded import ShardedActivation, unwrap
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.tensor_parallel.route import Route, run


@dataclass(frozen=True)
class SplitLogits:
    """One rank's part of the logits.

    Attributes:
        local: [.., columns held], padding behind ``stop - start`` of them.
        group: over which the columns are split; None when they are whole.
        start, stop: columns held, of ``total``.
        sum_over: a sum over the rows held becomes one of the rows in the user layout by summing over this group,
        shared_by: divided by this number: the ranks that then hold the same sum and are counted as different.
    """

    local: Tensor
    group: AxisGroup | None
    start: int
    stop: int
    total: int
    sum_over: AxisGroup | None = None
    shared_by: int = 1

    def settle(self, total: Tensor) -> Tensor:
        """A sum over the rows held, as the user layout has it; its gradient passes as it is.

        Where these are other rows than those of the rank's samples (3D), ranks whose samples share them each get an
        equal share: the sum over all ranks is exact, that of one rank is not the sum of its own samples.
        """
        if self.sum_over is None:
            return total
        settled: Tensor = _Settle.apply(total, self.sum_over, self.shared_by)
        return settled


def take_split(logits: Tensor, labels: Tensor) -> tuple[SplitLogits, Tensor]:
    """The parts of the logits, and the labels of the rows held.

    Args:
        logits: [.., columns], plain or with split features.
        labels: [..], in the user layout.

    Raises:
        ValueError: for shapes that do not fit.
    """
    if not isinstance(logits, ShardedActivation):
        _check(logits, labels, labels)
        width = logits.shape[-1]
        return SplitLogits(logits, None, 0, width, width), labels
    parallel = logits.parallel
    local, activation, _ = unwrap(logits, parallel)
    context, ndim, user = parallel.context, local.dim(), parallel.regions.user
    here, there = (Layout(a.rows().at(ndim).dims[:-1]) for a in (activation, user))
    if labels.dim() != ndim - 1:
        _check(logits, labels, labels)
    held = labels if here == there else run(Route.of(moves(there, here), context).forward, labels).wait()
    _check(logits, labels, held)
    group = context.group(activation.features)
    width = local.shape[-1]
    total = logits.num_features or width * group.size
    start = min(group.index * width, total)
    mine, users = here.shard_axes, there.shard_axes
    extra = tuple(axis for axis in mine if axis not in users)
    shared_by = math.prod(context.grid.sizes[axis] for axis in users if axis not in mine)
    moved = bool(extra) or shared_by > 1
    split = SplitLogits(
        local, group, start, min(start + width, total), total, context.group(extra) if moved else None, shared_by
    )
    return split, held


def _check(logits: Tensor, labels: Tensor, held: Tensor) -> None:
    if held.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, logits {tuple(logits.shape)}: all dims but the last must agree"
        )


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, group: AxisGroup, shared_by: int) -> Tensor:
        return collectives.all_reduce(total, group).wait() / shared_by

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None
