"""Cross-entropy and accuracy over a vocabulary that may be split; the logits are never gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.autograd import first_order
from colossus.comm.kept_results import kept
from colossus.layers.embedding import check_range
from colossus.layers.lm_head import LMHead, no_chunks
from colossus.layers.token_values import ChunkedLogits, Logits, LogitsLayout, SplitLogits, aligned_tokens, token_values
from colossus.tensor_parallel.dtypes import to_wide_dtype


def cross_entropy(
    input: Logits,
    target: Tensor,
    *,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all valid tokens, and their number.

    The engine divides by the number of valid tokens of the global batch, so that the loss does not depend on how the
    batch is split: sum and number cover the samples of this rank in the whole layout. A vocabulary that is split over
    ranks costs one all-gather, of 3 numbers per token and rank (4 with smoothing).

    Args:
        input: the logits, [.., vocabulary], plain or with split features, or logits in chunks.
        target: the labels, [..] in 0..vocabulary-1, or ``ignore_index``; in the whole layout.
        token_weights: the weight of each token's loss, [..], 0 or more; default 1. The number is then the sum of the
            weights of valid tokens.
        ignore_index: label of tokens that are not valid.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: weight of the squared log-partition, which keeps logits from drifting (2204.02311, section 5).

    Returns:
        (sum, count): scalars, the same on all tensor ranks with the same samples.

    Raises:
        ValueError: shapes do not fit, or labels are outside the vocabulary (checked on CPU).
    """
    numbers = (target,) if token_weights is None else (target, token_weights)
    over_tokens, (labels, *weights) = aligned_tokens(input, *numbers)

    def losses(split: SplitLogits, labels: Tensor) -> Tensor:
        return label_losses(split, labels, ignore_index, label_smoothing, z_loss)

    values, valid = token_values(losses, input, labels), labels != ignore_index
    return weighted_sum(values, valid, weights[0] if weights else None, over_tokens)


def weighted_sum(
    values: Tensor, valid: Tensor, weights: Tensor | None, over_tokens: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sum of the values of valid tokens, and their number; with weights, of both multiplied by these.

    Args:
        values, valid, weights: of this rank's tokens, [..].
        over_tokens: sums over the ranks that split tokens, see `colossus.layers.token_values.aligned_tokens`.
    """
    values = values.masked_fill(~valid, 0.0)
    if weights is None:
        return over_tokens(values.sum()), over_tokens(valid.sum())
    weight = weights.to(values.dtype).masked_fill(~valid, 0.0)
    return over_tokens((values * weight).sum()), over_tokens(weight.sum(dtype=torch.float64))


def chunked_cross_entropy(
    hidden: Tensor, head: LMHead, target: Tensor, *, chunk: int, cap: float | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy` of the logits ``head(hidden)``, of which a rank never has more than a chunk.

    Forward and backward make the logits of a chunk, use and free them: one product more than with all logits at once.
    A weight that ranks share is gathered once for all chunks, and its gradient reduced once.

    Args:
        hidden: the input of the head, [batch, tokens, features], in any layout that the head takes.
        head: a `colossus.layers.LMHead`.
        target: the labels, [batch, tokens], as for `cross_entropy`.
        chunk: the most rows (samples x tokens) of a rank's chunk; at least one token of each sample.
        cap: logits are ``cap * tanh(logits / cap)``; None: as they are.
        options: further arguments of `cross_entropy`.

    Raises:
        ValueError: as `cross_entropy`; or ``head`` is no `LMHead`.
    """
    if not isinstance(head, LMHead):
        raise no_chunks(head)
    return cross_entropy(ChunkedLogits(hidden, head, chunk, cap), target, **options)


def label_losses(
    split: SplitLogits, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the loss of each token of a rank's rows, [..], 0 where the label is ``ignore_index``."""
    logits, layout = split
    flat, valid = logits.reshape(-1, logits.shape[-1]), labels != ignore_index
    if layout.group is None and z_loss == 0.0 and layout.leaves == 1:
        loss = F.cross_entropy(
            to_wide_dtype(flat),
            labels.reshape(-1),
            reduction="none",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    else:
        check_range(labels.masked_fill(~valid, 0), layout.total, "labels")
        loss = _CrossEntropy.apply(flat, labels.reshape(-1), valid.reshape(-1), layout, label_smoothing, z_loss)
    return loss.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """The losses of a rank's rows, for logits with a split vocabulary. Shapes are per rank, for t rows.

        logits          [t, v]     the first stop - start columns belong to the vocabulary, the rest is padding
        labels, valid   [t]        of these rows, over the whole vocabulary
        log_sum         [t]        log-sum-exp over the whole vocabulary, the same on all ranks of the group

        forward  each leaf's maximum, sum of exponentials and target logit (0 where another leaf has it), and the sum
                 of logits when smoothing, are all-gathered: 3 or 4 [t]; a rank's columns are one leaf, or several
                 under ``train.reproducible``. The losses [t] are the same on all ranks.
        dgrad    dlogits [t, v] = (softmax - one_hot(labels)) * grad, more with smoothing and z_loss; 0 for padding
                 no communication: the loss is replicated over the group, so grad is the same on all ranks, and with
                 log_sum, which is saved, a column's gradient needs no other column

    There is no weight, and so no wgrad. If logits are of low precision, so are dlogits, and the rest is float32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, valid: Tensor, split: LogitsLayout, smoothing: float, z_loss: float
    ) -> Tensor:
        narrow, logits = logits, to_wide_dtype(logits)
        columns = logits[:, : split.stop - split.start]
        is_local = (labels >= split.start) & (labels < split.stop) & valid
        column = (labels - split.start).masked_fill_(~is_local, 0)
        leaves = columns.unflatten(1, (split.leaves, -1)).transpose(0, 1).contiguous()
        target = columns.new_zeros(split.leaves, columns.shape[0])
        if columns.shape[1]:
            maximum = leaves.amax(-1)
            exponentials = (leaves - maximum.unsqueeze(-1)).exp_().sum(-1)
            target[0] = columns.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(~is_local, 0.0)
        else:  # this rank has only padding
            maximum, exponentials = torch.full_like(target, float("-inf")), torch.zeros_like(target)
        rows = [maximum, exponentials, target] + ([leaves.sum(-1)] if smoothing else [])
        own, vocabulary_ranks = torch.stack(rows, 1), split.group
        by_leaf = own
        if vocabulary_ranks is not None:
            by_leaf = kept("the sums of logits", lambda: collectives.all_gather(own, vocabulary_ranks).wait())
        highest = by_leaf[:, 0].amax(0)
        log_sum = highest + (by_leaf[:, 1] * (by_leaf[:, 0] - highest).exp()).sum(0).log()
        loss = log_sum - by_leaf[:, 2].sum(0)
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - by_leaf[:, 3].sum(0) / split.total)
        if z_loss:
            loss = loss + z_loss * log_sum.square()
        ctx.save_for_backward(narrow, log_sum, column, is_local, valid)
        ctx.options = split.stop - split.start, split.total, smoothing, z_loss
        return loss.masked_fill(~valid, 0.0)

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
def accuracy(input: Logits, target: Tensor, *, k: int = 1, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
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
    over_tokens, (labels,) = aligned_tokens(input, target)

    def is_right(split: SplitLogits, labels: Tensor) -> Tensor:
        return _is_among_highest(split, labels, k, ignore_index)

    correct = token_values(is_right, input, labels).sum()
    return over_tokens(correct), over_tokens((labels != ignore_index).sum().double())


def _is_among_highest(split: SplitLogits, labels: Tensor, k: int, ignore_index: int) -> Tensor:
    """Return 1.0 for each valid token of a rank's rows whose label is among the ``k`` highest logits, else 0.0."""
    logits, layout = split
    columns = logits[..., : layout.stop - layout.start]
    valid = labels != ignore_index
    is_local = (labels >= layout.start) & (labels < layout.stop) & valid
    column = (labels - layout.start).masked_fill_(~is_local, 0).unsqueeze(-1)
    if columns.shape[-1]:
        label_logits = columns.gather(-1, column).squeeze(-1).masked_fill_(~is_local, 0.0)
    else:  # this rank has only padding
        label_logits = torch.zeros(labels.shape, dtype=columns.dtype, device=columns.device)
    if layout.group is not None:
        label_logits = collectives.all_reduce(label_logits, layout.group, owned=True).wait()
    label_logits = label_logits.unsqueeze(-1)
    index = torch.arange(layout.start, layout.stop, device=labels.device)
    # NaN counts as higher: a model that returns NaN is never right
    above = ~(columns <= label_logits) | ((columns == label_logits) & (index < labels.unsqueeze(-1)))
    higher = above.sum(-1).double()
    if layout.group is not None:
        higher = collectives.all_reduce(higher, layout.group, owned=True).wait()
    return ((higher < k) & valid).double()
