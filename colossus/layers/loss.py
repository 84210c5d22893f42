"""Cross-entropy and accuracy over a vocabulary that may be split; the logits are never gathered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.autograd import first_order
from colossus.comm.kept_results import kept
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.layers.embedding import check_range
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.sharded_tensor.regions import as_aligned, local, sequence_place, unwrap
from colossus.sharded_tensor.tensor import ShardedTensor
from colossus.sharded_tensor.token_collectives import sum_over_ranks
from colossus.tensor_parallel.dtypes import to_wide_dtype
from colossus.tensor_parallel.move_plan import MovePlan, run


@dataclass(frozen=True)
class SplitLogits:
    """One rank's rows and columns of the logits.

    Attributes:
        local: [.., columns]; columns behind the first ``stop - start`` are padding.
        group: the ranks over which the columns are split; None if the rank has all.
        start, stop: the rank's columns, of ``total``.
        sum_over, shared_by: see `to_whole_sum`; None and 1 if the rank's rows are those of its own samples.
    """

    local: Tensor
    group: AxisGroup | None
    start: int
    stop: int
    total: int
    sum_over: AxisGroup | None = None
    shared_by: int = 1

    def to_whole_sum(self, local_sum: Tensor) -> Tensor:
        """Return a sum over the rank's rows as an addend of the sum over all ranks of the whole layout.

        In 3D the rank's rows are not those of its samples. The sums are added over ``sum_over`` and divided by
        ``shared_by``, the number of ranks of different samples that then have the same sum: the sum over all ranks is
        exact, that of one rank is not the sum of its own samples. The gradient is unchanged.
        """
        if self.sum_over is None:
            return local_sum
        total: Tensor = _UserSum.apply(local_sum, self.sum_over, self.shared_by)
        return total


def local_logits_and_labels(logits: Tensor, labels: Tensor) -> tuple[SplitLogits, Tensor]:
    """Return the rank's rows and columns of the logits, and the labels of these rows.

    ``labels`` are in the whole layout.
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
        _check(shard, labels, labels)
    own = labels
    if rows != user_rows:
        plan = MovePlan.of(moves(user_rows, rows), context)
        own = kept("the labels of tokens", lambda: run(plan.forward, labels).wait())
    _check(shard, labels, own)
    group = context.group(activation.features)
    width = shard.shape[-1]
    total = placement.num_features or width * group.size
    start = min(group.index * width, total)
    axes, user_axes = rows.shard_axes, user_rows.shard_axes
    extra = tuple(axis for axis in axes if axis not in user_axes)
    shared_by = math.prod(context.grid.sizes[axis] for axis in user_axes if axis not in axes)
    sum_over = context.group(extra) if extra or shared_by > 1 else None
    return SplitLogits(shard, group, start, min(start + width, total), total, sum_over, shared_by), own


def _check(logits: Tensor, labels: Tensor, own: Tensor) -> None:
    """Raise ValueError unless ``own``, the labels of the rank's rows, fit the logits."""
    if own.shape != logits.shape[:-1]:
        raise located_error(
            f"labels have shape {tuple(labels.shape)}, logits {tuple(logits.shape)}: all dims but the last must agree"
        )


class _UserSum(torch.autograd.Function):
    """A scalar summed over a group and divided; backward is the identity: each rank keeps the gradient of its rows."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, group: AxisGroup, shared_by: int) -> Tensor:
        return kept("the sum of a loss", lambda: collectives.all_reduce(total, group).wait() / shared_by)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all valid tokens, and their number.

    The engine divides by the number of valid tokens of the global batch, so that the loss does not depend on how the
    batch is split: sum and number cover the samples of this rank in the whole layout. A vocabulary that is split over
    ranks costs one all-gather, of 3 numbers per token and rank (4 with smoothing).

    Args:
        input: the logits, [.., vocabulary], plain or with split features.
        target: the labels, [..] in 0..vocabulary-1, or ``ignore_index``; in the whole layout.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: weight of the squared log-partition, which keeps logits from drifting (2204.02311, section 5).

    Returns:
        (sum, count): scalars, the same on all tensor ranks with the same samples. In 3D a rank's sum is its share of
            the sum over all ranks (see `SplitLogits.to_whole_sum`), since other ranks have the logits of its samples.

    Raises:
        ValueError: shapes do not fit, or labels are outside the vocabulary (checked on CPU).
    """
    over_tokens, labels = _labels_of(input, target)
    count = (labels != ignore_index).sum()  # counts the rank's own samples, though it may have other rows of the logits
    split, labels = local_logits_and_labels(input, labels)
    flat = split.local.reshape(-1, split.local.shape[-1])
    valid = labels != ignore_index
    if split.group is None and z_loss == 0.0:
        loss = F.cross_entropy(
            to_wide_dtype(flat),
            labels.reshape(-1),
            reduction="sum",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
        return over_tokens(loss), over_tokens(count)
    check_range(labels.masked_fill(~valid, 0), split.total, "labels")
    loss = _CrossEntropy.apply(flat, labels.reshape(-1), valid.reshape(-1), split, label_smoothing, z_loss)
    return over_tokens(split.to_whole_sum(loss)), over_tokens(count)


def _labels_of(logits: Tensor, labels: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return a function that sums over all tokens, and this rank's labels of the tokens whose logits it has."""
    split = next((x for x in (logits, labels) if sequence_place(x) is not None), None)
    if split is None:
        return lambda total: total, local(labels)
    parallel, place = split.placement.parallel, sequence_place(labels)  # type: ignore[attr-defined]
    if sequence_place(logits) is not None and place is not None:
        labels = as_aligned(labels, sequence_place(logits), parallel)

    def over_tokens(total: Tensor) -> Tensor:  # in as many digits as the engine adds up ranks in
        return sum_over_ranks(total.double() if total.is_floating_point() else total, parallel)

    return over_tokens, local(labels)


class _CrossEntropy(torch.autograd.Function):
    """Sum of the losses of a rank's rows, for logits with a split vocabulary. Shapes are per rank, for t rows.

        logits          [t, v]     the first stop - start columns belong to the vocabulary, the rest is padding
        labels, valid   [t]        of these rows, over the whole vocabulary
        log_sum         [t]        log-sum-exp over the whole vocabulary, the same on all ranks of the group

        forward  each rank's maximum, sum of exponentials and target logit (0 where another rank has it), and the sum
                 of logits when smoothing, are all-gathered: 3 or 4 [t]. The loss, a scalar, is the same on all ranks.
        dgrad    dlogits [t, v] = (softmax - one_hot(labels)) * grad, more with smoothing and z_loss; 0 for padding
                 no communication: the loss is replicated over the group, so grad is the same on all ranks, and with
                 log_sum, which is saved, a column's gradient needs no other column

    There is no weight, and so no wgrad. If logits are of low precision, so are dlogits, and the rest is float32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, valid: Tensor, split: SplitLogits, smoothing: float, z_loss: float
    ) -> Tensor:
        narrow, logits = logits, to_wide_dtype(logits)
        columns = logits[:, : split.stop - split.start]
        is_local = (labels >= split.start) & (labels < split.stop) & valid
        column = (labels - split.start).masked_fill_(~is_local, 0)
        if columns.shape[1]:
            maximum = columns.amax(-1)
            exponentials = (columns - maximum.unsqueeze(-1)).exp_().sum(-1)
            target = columns.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(~is_local, 0.0)
        else:  # this rank has only padding
            maximum = logits.new_full((logits.shape[0],), float("-inf"))
            exponentials, target = torch.zeros_like(maximum), torch.zeros_like(maximum)
        rows = [maximum, exponentials, target] + ([columns.sum(-1)] if smoothing else [])
        own, vocabulary_ranks = torch.stack(rows).unsqueeze(0), split.group
        by_rank = own
        if vocabulary_ranks is not None:
            by_rank = kept("the sums of logits", lambda: collectives.all_gather(own, vocabulary_ranks).wait())
        highest = by_rank[:, 0].amax(0)
        log_sum = highest + (by_rank[:, 1] * (by_rank[:, 0] - highest).exp()).sum(0).log()
        loss = log_sum - by_rank[:, 2].sum(0)
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - by_rank[:, 3].sum(0) / split.total)
        if z_loss:
            loss = loss + z_loss * log_sum.square()
        ctx.save_for_backward(narrow, log_sum, column, is_local, valid)
        ctx.options = split.stop - split.start, split.total, smoothing, z_loss  # `split` would keep the logits alive
        return loss.masked_fill(~valid, 0.0).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        narrow, log_sum, column, is_local, valid = ctx.saved_tensors
        logits = to_wide_dtype(narrow)
        width, total, smoothing, z_loss = ctx.options
        weight = valid.to(logits.dtype) * grad
        out = (logits - log_sum.unsqueeze(-1)).exp_()
        out.mul_((weight * (1.0 + 2.0 * z_loss * log_sum)).unsqueeze(-1))
        if width:
            hit = (weight * (smoothing - 1.0)).masked_fill(~is_local, 0.0)
            out.scatter_add_(1, column.unsqueeze(1), hit.unsqueeze(1))
        if smoothing:
            out.sub_((weight * (smoothing / total)).unsqueeze(-1))
        if width < out.shape[1]:
            out[:, width:] = 0.0
        return out.to(narrow.dtype), None, None, None, None, None


@torch.no_grad()
def accuracy(input: Tensor, target: Tensor, *, k: int = 1, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return the number of valid tokens whose label is among the ``k`` highest logits, and that of all valid tokens.

    The logits are never gathered: a label is right when fewer than k columns are higher than its own. Of equal logits
    the one with the lower index counts as higher, as in ``torch.argmax``.

    Args:
        input: the logits, [.., vocabulary], plain or with split features.
        target: the labels, [..] in 0..vocabulary-1, or ``ignore_index``; in the whole layout.

    Returns:
        (correct, count): float64 scalars over all tokens of this rank's samples in the whole layout; sum them over the
            ranks with other samples.
    """
    over_tokens, labels = _labels_of(input, target)
    count = (labels != ignore_index).sum().double()
    split, labels = local_logits_and_labels(input, labels)
    columns = split.local[..., : split.stop - split.start]
    valid = labels != ignore_index
    is_local = (labels >= split.start) & (labels < split.stop) & valid
    column = (labels - split.start).masked_fill_(~is_local, 0).unsqueeze(-1)
    if columns.shape[-1]:
        picked = columns.gather(-1, column).squeeze(-1).masked_fill_(~is_local, 0.0)
    else:  # this rank has only padding
        picked = torch.zeros(labels.shape, dtype=columns.dtype, device=columns.device)
    if split.group is not None:
        picked = collectives.all_reduce(picked, split.group, owned=True).wait()
    picked = picked.unsqueeze(-1)
    index = torch.arange(split.start, split.stop, device=labels.device)
    # NaN counts as higher: a model that returns NaN is never right
    above = ~(columns <= picked) | ((columns == picked) & (index < labels.unsqueeze(-1)))
    higher = above.sum(-1).double()
    if split.group is not None:
        higher = collectives.all_reduce(higher, split.group, owned=True).wait()
    correct = ((higher < k) & valid).sum().double()
    return over_tokens(split.to_whole_sum(correct)), over_tokens(count)
