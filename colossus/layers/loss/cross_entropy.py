"""Cross-entropy over a vocabulary that may be split; the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives
from colossus.layers.embedding import check_range
from colossus.layers.loss.split_logits import SplitLogits, take_split


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
    batch is split: sum and number are of the samples this rank holds in the user layout. With the vocabulary split over
    n ranks one all-gather of 3 numbers per token (4 with smoothing) does all: each rank's maximum, its sum of
    exponentials, and the target's logit where it has it.

    Args:
        logits: [.., vocabulary], plain or with split features.
        labels: [..] in 0..vocabulary-1, or ``ignore_index``; in the user layout.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: weight of the squared log-partition, which keeps logits from drifting (2204.02311, section 5).

    Returns:
        (sum, count): scalars, the same on all tensor ranks that hold the same samples. In 3D a rank's sum is its share
        of the sum over all ranks (see `SplitLogits.settle`), since other ranks have the logits of its samples.

    Raises:
        ValueError: for shapes that do not fit, and for labels outside the vocabulary (checked on CPU).
    """
    count = (labels != ignore_index).sum()  # of the rank's own samples, whichever rows of the logits it has
    split, labels = take_split(logits, labels)
    flat = split.local.reshape(-1, split.local.shape[-1])
    valid = labels != ignore_index
    if split.group is None and z_loss == 0.0:
        loss = F.cross_entropy(
            flat, labels.reshape(-1), reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        return loss, count
    check_range(labels.masked_fill(~valid, 0), split.total, "labels")
    loss = _CrossEntropy.apply(flat, labels.reshape(-1), valid.reshape(-1), split, label_smoothing, z_loss)
    return split.settle(loss), count


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, valid: Tensor, span: SplitLogits, smoothing: float, z_loss: float
    ) -> Tensor:
        held = logits[:, : span.stop - span.start]
        here = (labels >= span.start) & (labels < span.stop) & valid
        column = (labels - span.start).masked_fill_(~here, 0)
        if held.shape[1]:
            top = held.amax(-1)
            exponentials = (held - top.unsqueeze(-1)).exp_().sum(-1)
            picked = held.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(~here, 0.0)
        else:  # a rank that holds only padding
            top = logits.new_full((logits.shape[0],), float("-inf"))
            exponentials, picked = torch.zeros_like(top), torch.zeros_like(top)
        rows = [top, exponentials, picked] + ([held.sum(-1)] if smoothing else [])
        parts = torch.stack(rows).unsqueeze(0)
        if span.group is not None:
            parts = collectives.all_gather(parts, span.group).wait()
        highest = parts[:, 0].amax(0)
        log_sum = highest + (parts[:, 1] * (parts[:, 0] - highest).exp()).sum(0).log()
        loss = log_sum - parts[:, 2].sum(0)
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - parts[:, 3].sum(0) / span.total)
        if z_loss:
            loss = loss + z_loss * log_sum.square()
        ctx.save_for_backward(logits, log_sum, column, here, valid)
        ctx.options = span, smoothing, z_loss
        return loss.masked_fill(~valid, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, column, here, valid = ctx.saved_tensors
        span, smoothing, z_loss = ctx.options
        width = span.stop - span.start
        weight = valid.to(logits.dtype) * grad
        out = (logits - log_sum.unsqueeze(-1)).exp_()
        out.mul_((weight * (1.0 + 2.0 * z_loss * log_sum)).unsqueeze(-1))
        if width:
            hit = (weight * (smoothing - 1.0)).masked_fill(~here, 0.0)
            out.scatter_add_(1, column.unsqueeze(1), hit.unsqueeze(1))
        if smoothing:
            out.sub_((weight * (smoothing / span.total)).unsqueeze(-1))
        if width < out.shape[1]:
            out[:, width:] = 0.0
        return out, None, None, None, None, None
