"""Distillation: the divergence between two models' next tokens, over a vocabulary that may be split.

The logits of neither model are gathered (Hinton et al., 1503.02531; the reverse divergence as in 2306.08543).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.autograd import first_order
from colossus.layers.loss import label_losses, weighted_sum
from colossus.layers.token_values import Logits, LogitsLayout, SplitLogits, aligned_tokens, token_values
from colossus.tensor_parallel.dtypes import to_wide_dtype


def distillation_loss(
    input: Logits,
    teacher: Logits,
    target: Tensor,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    label_weight: float = 0.0,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all valid tokens, and their number; see `colossus.layers.cross_entropy`.

        loss = (1 - label_weight) * temperature^2 * KL + label_weight * cross-entropy of the label

    with KL = sum over words of p log(p / q), p = softmax(teacher / temperature) and q = softmax(input / temperature);
    ``reverse`` exchanges p and q. A split vocabulary costs three all-reduces of a few numbers per token.

    Args:
        input: the logits that are trained, [.., vocabulary], plain, with split features, or in chunks.
        teacher: the logits of the other model for the same tokens; they get no gradient.
        target: the labels, [..]; those of ``ignore_index`` are left out. Their values matter with ``label_weight``.
        top_k: p has only the words whose logit is at least the k-th highest of the token, renormalised; q has all.
        token_weights: as for `colossus.layers.cross_entropy`.

    Raises:
        ValueError: shapes or vocabularies do not fit, or ``top_k`` with ``reverse``, which would be infinite.
    """
    if reverse and top_k is not None:
        raise ValueError("distillation_loss: top_k leaves the teacher no chance for other words, to which the reverse "
                         "divergence is infinite: use reverse=False, or all words")  # fmt: skip
    numbers = (target,) if token_weights is None else (target, token_weights)
    over_tokens, (labels, *weights) = aligned_tokens(input, *numbers)

    def losses(split: SplitLogits, other: Tensor, labels: Tensor) -> Tensor:
        value = divergence(split, other, reverse=reverse, temperature=temperature, top_k=top_k)
        value = value * ((1.0 - label_weight) * temperature**2)
        if label_weight:
            value = value + label_weight * label_losses(split, labels, ignore_index)
        return value

    values = token_values(losses, input, labels, other=teacher)
    return weighted_sum(values, labels != ignore_index, weights[0] if weights else None, over_tokens)


def divergence(
    split: SplitLogits, teacher: Tensor, *, reverse: bool = False, temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Return the divergence of each token of a rank's rows, [..]; ``teacher`` has the same rows and columns."""
    logits, layout = split
    flat, other = logits.reshape(-1, logits.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    if top_k is not None:
        other = _highest(to_wide_dtype(other), layout, top_k)
    values: Tensor = _Divergence.apply(flat, other, layout, temperature, reverse)
    return values.view(logits.shape[:-1])


def _highest(logits: Tensor, layout: LogitsLayout, k: int) -> Tensor:
    """Return logits [t, columns] with -inf in place of those below the k-th highest of their row over all ranks."""
    columns = logits[:, : layout.stop - layout.start]
    values = logits.new_full((logits.shape[0], k), float("-inf"))
    count = min(k, columns.shape[1])
    if count:
        values[:, :count] = columns.topk(count, -1).values
    if layout.group is not None and layout.group.size > 1:
        values = collectives.all_gather(values, layout.group, 1).wait().topk(k, -1).values
    return logits.masked_fill(logits < values[:, -1:], float("-inf"))


class _Divergence(torch.autograd.Function):
    """The divergence of two models' words for each of t tokens. Shapes are per rank.

        logits, teacher   [t, v]    the first stop - start columns belong to the vocabulary, the rest is padding
        log_sums          [2, t]    log-sum-exps over the whole vocabulary, divided by the temperature

        forward  maxima and sums of exponentials of both, [2, t], are all-reduced, then the sums of the terms, [t]
        dgrad    dlogits [t, v] = (q - p) / temperature, or of the reverse q (log q - log p - value) / temperature

    No communication in the backward: values are the same on all ranks of the group, and so is their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, layout: LogitsLayout, temperature: float, reverse: bool
    ) -> Tensor:
        width = layout.stop - layout.start
        both = torch.stack((to_wide_dtype(logits)[:, :width], to_wide_dtype(teacher)[:, :width])) / temperature
        shape = both.shape[:2]
        highest = both.amax(-1) if width else both.new_full(shape, float("-inf"))
        highest = _reduced(highest, layout, "max")
        log_sums = _reduced((both - highest[..., None]).exp().sum(-1), layout, "sum").log() + highest
        own, other = both - log_sums[..., None]
        # a word without a chance, of logit -inf, adds nothing
        terms = (
            own.exp() * (own - other) if reverse else torch.where(other.isneginf(), 0.0, other.exp() * (other - own))
        )
        values = _reduced(terms.sum(-1), layout, "sum")
        ctx.save_for_backward(logits, teacher, log_sums, values)
        ctx.options = width, temperature, reverse
        return values

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher, log_sums, values = ctx.saved_tensors
        width, temperature, reverse = ctx.options
        own = to_wide_dtype(logits)[:, :width] / temperature - log_sums[0, :, None]
        other = to_wide_dtype(teacher)[:, :width] / temperature - log_sums[1, :, None]
        part = own.exp() * (own - other - values[:, None]) if reverse else own.exp() - other.exp()
        out = torch.zeros_like(logits)
        out[:, :width] = part * (grads[0] / temperature)[:, None]
        return out, None, None, None, None


def _reduced(x: Tensor, layout: LogitsLayout, op: str) -> Tensor:
    """Return numbers of each token reduced over the ranks that split the vocabulary."""
    if layout.group is None or layout.group.size == 1:
        return x
    return collectives.all_reduce(x, layout.group, op=op, owned=True).wait()
