"""Losses of log-probabilities: preferences between pairs of texts (DPO, IPO), and a policy's own texts (GRPO).

Log-probabilities of tokens come from logits whose vocabulary may be split. Those of a text are summed over all of its
tokens, also where ranks split them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.error_place import located_error
from colossus.layers.loss import label_losses, weighted_sum
from colossus.layers.token_values import ChunkedLogits, Logits, aligned_tokens, token_values

#: what a model that is compared with says of tokens: its logits, or their log-probabilities [batch, tokens]
Reference = Logits
Kind = Literal["sigmoid", "ipo"]


def token_log_probs(input: Logits, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Return the log-probability of each label, 0 where it is ``ignore_index``.

    Args:
        input: the logits, [.., vocabulary], plain, with split features, or in chunks.
        target: the labels, [..], in the whole layout.

    Returns:
        [..] of this rank's samples, plain; under ``parallel.sequence`` of this rank's tokens.
    """
    _, (labels,) = aligned_tokens(input, target)
    return -token_values(lambda split, labels: label_losses(split, labels, ignore_index), input, labels)


def dpo_loss(
    input: Logits,
    reference: Reference,
    target: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: Kind = "sigmoid",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all pairs, and their number (DPO, 2305.18290; IPO, 2310.12036).

    Samples 2 i and 2 i + 1 of a batch are a pair: the text that is preferred, and the other. With the margin h = log
    p(preferred) - log p(other), less the same of the reference, over the tokens with a label:

        sigmoid   -(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)
        ipo       (h - 1 / (2 beta))^2

    A pair without any label does not count.

    Args:
        input: the logits that are trained, [batch, tokens, vocabulary], plain, with split features, or in chunks.
        reference: those of the model to stay near to, or its log-probabilities of the labels, [batch, tokens].
        target: the labels, [batch, tokens]: ``ignore_index`` for those of the prompt.

    Raises:
        ValueError: the samples of this rank are not pairs.
    """
    margins, counted = dpo_margins(input, reference, target, ignore_index=ignore_index)
    return preference_loss(margins, counted, beta=beta, label_smoothing=label_smoothing, kind=kind)


def preference_loss(
    margins: Tensor, counted: Tensor, *, beta: float, label_smoothing: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """Return `dpo_loss` from the results of `dpo_margins`."""
    if kind == "ipo":
        losses = (margins - 1.0 / (2.0 * beta)).square()
    else:
        losses = -(1.0 - label_smoothing) * F.logsigmoid(beta * margins)
        if label_smoothing:
            losses = losses - label_smoothing * F.logsigmoid(-beta * margins)
    return losses.masked_fill(~counted, 0.0).sum(), counted.sum()


def dpo_margins(
    input: Logits, reference: Reference, target: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the margin h of each pair of `dpo_loss`, [pairs], and whether it has a label."""
    over_tokens, (labels,) = aligned_tokens(input, target)
    if len(labels) % 2:
        raise located_error(
            f"samples 2 i and 2 i + 1 are the preferred and the other text of a pair, but a rank has {len(labels)} "
            f"samples: with collate_fn=colossus.data.collate_pairs a batch has whole pairs on each rank"
        )
    own = token_log_probs(input, target, ignore_index=ignore_index)
    ratios = own - _log_probs(reference, input, target, ignore_index).to(own.dtype)
    valid = labels != ignore_index
    sums = over_tokens(ratios.masked_fill(~valid, 0.0).sum(1)).unflatten(0, (-1, 2))
    return sums[:, 0] - sums[:, 1], over_tokens(valid.sum(1)).unflatten(0, (-1, 2)).sum(1) > 0


def policy_loss(
    input: Logits,
    target: Tensor,
    advantages: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    reference: Reference | None = None,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl_weight: float = 0.0,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all valid tokens, and their number: GRPO's loss (2402.03300, section 4.1).

        ratio = exp(log p - log p_old)
        loss  = -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A) + kl_weight (r - log r - 1),  r = p_reference / p

    The mean over all tokens of the global batch is that of DAPO (2503.14476); with ``token_weights`` of 1 / length of
    a text it is the mean over texts, as in GRPO.

    Args:
        input: the logits that are trained, [batch, tokens, vocabulary], plain, with split features, or in chunks.
        target: the labels, [batch, tokens]: ``ignore_index`` for those of the prompt.
        advantages: of each text, [batch], or of each token, [batch, tokens]; see `group_advantages`.
        old_log_probs: log-probabilities of the labels under the policy that wrote the texts, [batch, tokens]; None: it
            is this one, and the ratio is 1.
        reference: logits of the model to stay near to, or log-probabilities, as for `dpo_loss`; with ``kl_weight``.
        clip_high: by default ``clip``.
        token_weights: as for `colossus.layers.cross_entropy`.

    Raises:
        ValueError: ``old_log_probs`` or ``token_weights`` are not [batch, tokens].
    """
    for name, x in (("old_log_probs", old_log_probs), ("token_weights", token_weights)):
        if x is not None and x.dim() != target.dim():
            raise located_error(f"policy_loss: {name} has shape {tuple(x.shape)}, not [batch, tokens] like the labels")
    extra = [x for x in (advantages, old_log_probs, token_weights) if x is not None and x.dim() > 1]
    over_tokens, (labels, *more) = aligned_tokens(input, target, *extra)
    rest = iter(more)
    gain = next(rest) if advantages.dim() > 1 else advantages[:, None]
    old = None if old_log_probs is None else next(rest)
    weights = None if token_weights is None else next(rest)
    own, valid = token_log_probs(input, target, ignore_index=ignore_index), labels != ignore_index
    ratio = (own - (own.detach() if old is None else old.to(own.dtype)).masked_fill(~valid, 0.0)).exp()
    clipped = ratio.clamp(1.0 - clip, 1.0 + (clip if clip_high is None else clip_high))
    losses = -torch.minimum(ratio * gain, clipped * gain)
    if kl_weight and reference is not None:
        log_ratio = (_log_probs(reference, input, target, ignore_index).to(own.dtype) - own).masked_fill(~valid, 0.0)
        losses = losses + kl_weight * (log_ratio.exp() - log_ratio - 1.0)
    return weighted_sum(losses, valid, weights, over_tokens)


def group_advantages(rewards: Tensor, group: int, eps: float = 1e-6) -> Tensor:
    """Return (reward - mean) / (standard deviation + eps) of each group of consecutive texts, [texts] (GRPO).

    Groups must be whole: call it on all rewards, and put the result into the data.

    Raises:
        ValueError: groups are not whole, or of one text, which has no standard deviation.
    """
    if rewards.dim() != 1 or group < 2 or len(rewards) % group:
        raise located_error(
            f"group_advantages: rewards of shape {tuple(rewards.shape)} in groups of {group}: pass [texts] of whole "
            f"groups with 2 texts or more"
        )
    groups = rewards.unflatten(0, (-1, group))
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + eps)).flatten()


@torch.no_grad()
def _log_probs(reference: Reference, input: Logits, target: Tensor, ignore_index: int) -> Tensor:
    """Return the reference's log-probabilities of this rank's tokens, from its logits, or as they are."""
    if not isinstance(reference, ChunkedLogits) and reference.dim() == target.dim():
        _, (log_probs,) = aligned_tokens(input, reference)
        return log_probs
    return token_log_probs(reference, target, ignore_index=ignore_index)
