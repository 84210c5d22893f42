"""Logits of which a rank holds some rows and some columns, with the labels of its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.autograd import first_order
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.sharded_tensor.tensor import ShardedTensor, unwrap
from colossus.tensor_parallel.move_plan import MovePlan, run


@dataclass(frozen=True)
class SplitLogits:
    """One rank's rows and columns of the logits.

    Attributes:
        local: [.., columns], of which those behind the first ``stop - start`` are padding.
        group: over which the columns are split; None when the rank has all.
        start, stop: the rank's columns, of ``total``.
        sum_over, shared_by: see `to_whole_sum`; None and 1 when the rank's rows are those of its own samples.
    """

    local: Tensor
    group: AxisGroup | None
    start: int
    stop: int
    total: int
    sum_over: AxisGroup | None = None
    shared_by: int = 1

    def to_whole_sum(self, local_sum: Tensor) -> Tensor:
        """From a sum over the rank's rows to one that the whole layout adds up over ranks; its gradient is unchanged.

        In 3D the rank's rows are not those of its samples. The sums are added over ``sum_over`` and divided by
        ``shared_by``, the ranks of different samples that then hold the same sum: the sum over all ranks is exact, that
        of one rank is not the sum of its own samples.
        """
        if self.sum_over is None:
            return local_sum
        total: Tensor = _UserSum.apply(local_sum, self.sum_over, self.shared_by)
        return total


def local_logits_and_labels(logits: Tensor, labels: Tensor) -> tuple[SplitLogits, Tensor]:
    """The rank's rows and columns of the logits, and the labels of these rows.

    Args:
        logits: [.., columns], plain or with split features.
        labels: [..], in the whole layout.

    Raises:
        ValueError: for shapes that do not fit.
    """
    if isinstance(logits, ShardedTensor) and logits.placement.is_whole:
        logits, _ = unwrap(logits, logits.placement.parallel)
    if not isinstance(logits, ShardedTensor):
        _check(logits, labels, labels)
        width = logits.shape[-1]
        return SplitLogits(logits, None, 0, width, width), labels
    parallel = logits.placement.parallel
    shard, placement = unwrap(logits, parallel)
    activation = placement.activation
    context, ndim, user = parallel.context, shard.dim(), parallel.regions.whole
    rows, user_rows = (Layout(a.rows().at(ndim).dims[:-1]) for a in (activation, user))
    if labels.dim() != ndim - 1:
        _check(logits, labels, labels)
    own = labels if rows == user_rows else run(MovePlan.of(moves(user_rows, rows), context).forward, labels).wait()
    _check(logits, labels, own)
    group = context.group(activation.features)
    width = shard.shape[-1]
    total = placement.num_features or width * group.size
    start = min(group.index * width, total)
    axes, user_axes = rows.shard_axes, user_rows.shard_axes
    extra = tuple(axis for axis in axes if axis not in user_axes)
    shared_by = math.prod(context.grid.sizes[axis] for axis in user_axes if axis not in axes)
    moved = bool(extra) or shared_by > 1
    split = SplitLogits(
        shard, group, start, min(start + width, total), total, context.group(extra) if moved else None, shared_by
    )
    return split, own


def _check(logits: Tensor, labels: Tensor, own: Tensor) -> None:
    """``own``: the labels of the rank's rows."""
    if own.shape != logits.shape[:-1]:
        raise located_error(
            f"labels have shape {tuple(labels.shape)}, logits {tuple(logits.shape)}: all dims but the last must agree"
        )


class _UserSum(torch.autograd.Function):
    """A scalar summed over a group and divided; backward is the identity: each rank keeps the gradient of its rows."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, group: AxisGroup, shared_by: int) -> Tensor:
        return collectives.all_reduce(total, group).wait() / shared_by

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None
