"""Cross-entropy over a vocabulary that may be split; the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.autograd import first_order
from colossus.layers.embedding import check_range
from colossus.layers.loss.split_logits import SplitLogits, local_logits_and_labels
from colossus.sharded_tensor.regions import local
from colossus.tensor_parallel.dtypes import to_wide_dtype


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of all valid tokens, and their number.

    The engine divides by the number of valid tokens of the global batch, so that the loss does not depend on how the
    batch is split: sum and number are of the samples this rank holds in the whole layout. A vocabulary that is
    split over ranks costs one all-gather, of 3 numbers per token and rank (4 with smoothing).

    Args:
        logits: [.., vocabulary], plain or with split features.
        labels: [..] in 0..vocabulary-1, or ``ignore_index``; in the whole layout.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: weight of the squared log-partition, which keeps logits from drifting (2204.02311, section 5).

    Returns:
        (sum, count): scalars, the same on all tensor ranks that hold the same samples. In 3D a rank's sum is its share
        of the sum over all ranks (see `SplitLogits.to_whole_sum`), since other ranks have the logits of its samples.

    Raises:
        ValueError: for shapes that do not fit, and for labels outside the vocabulary (checked on CPU).
    """
    labels = local(labels)
    count = (labels != ignore_index).sum()  # of the rank's own samples, whichever rows of the logits it has
    split, labels = local_logits_and_labels(logits, labels)
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
        return loss, count
    check_range(labels.masked_fill(~valid, 0), split.total, "labels")
    loss = _CrossEntropy.apply(flat, labels.reshape(-1), valid.reshape(-1), split, label_smoothing, z_loss)
    return split.to_whole_sum(loss), count


class _CrossEntropy(torch.autograd.Function):
    """Sum of the losses of a rank's rows, of logits whose vocabulary is split. Shapes are per rank, of t rows.

        logits          [t, v]     the first stop - start columns are of the vocabulary, the rest is padding
        labels, valid   [t]        of these rows, over all of the vocabulary
        log_sum         [t]        log-sum-exp over the whole vocabulary, the same on all ranks of the group

        forward  each rank's maximum, sum of exponentials and target logit (0 where another rank has it), and the sum
                 of logits when smoothing, are all-gathered: 3 or 4 [t]. The loss, a scalar, is the same on all ranks.
        dgrad    dlogits [t, v] = (softmax - one_hot(labels)) * grad, more with smoothing and z_loss; 0 for padding
                 no communication: the loss is replicated over the group, so grad is the same on all ranks, and with
                 log_sum, which is saved, a column's gradient needs no other column

    There is no weight, and so no wgrad. Of low precision logits and dlogits have that, the rest is of float32.
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
        else:  # a rank that holds only padding
            maximum = logits.new_full((logits.shape[0],), float("-inf"))
            exponentials, target = torch.zeros_like(maximum), torch.zeros_like(maximum)
        rows = [maximum, exponentials, target] + ([columns.sum(-1)] if smoothing else [])
        by_rank = torch.stack(rows).unsqueeze(0)
        if split.group is not None:
            by_rank = collectives.all_gather(by_rank, split.group).wait()
        highest = by_rank[:, 0].amax(0)
        log_sum = highest + (by_rank[:, 1] * (by_rank[:, 0] - highest).exp()).sum(0).log()
        loss = log_sum - by_rank[:, 2].sum(0)
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - by_rank[:, 3].sum(0) / split.total)
        if z_loss:
            loss = loss + z_loss * log_sum.square()
        ctx.save_for_backward(narrow, log_sum, column, is_local, valid)
        ctx.options = split, smoothing, z_loss
        return loss.masked_fill(~valid, 0.0).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        narrow, log_sum, column, is_local, valid = ctx.saved_tensors
        logits = to_wide_dtype(narrow)
        split, smoothing, z_loss = ctx.options
        width = split.stop - split.start
        weight = valid.to(logits.dtype) * grad
        out = (logits - log_sum.unsqueeze(-1)).exp_()
        out.mul_((weight * (1.0 + 2.0 * z_loss * log_sum)).unsqueeze(-1))
        if width:
            hit = (weight * (smoothing - 1.0)).masked_fill(~is_local, 0.0)
            out.scatter_add_(1, column.unsqueeze(1), hit.unsqueeze(1))
        if smoothing:
            out.sub_((weight * (smoothing / split.total)).unsqueeze(-1))
        if width < out.shape[1]:
            out[:, width:] = 0.0
        return out.to(narrow.dtype), None, None, None, None, None
