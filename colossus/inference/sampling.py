"""From logits to the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.inference.sampling_options import Sampling
from colossus.random import hash_key

#: what stands for a token where the logits are not numbers
NOT_A_NUMBER = -1
_BITS = 48


def uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1), a function of its arguments alone: the same under every plan, in every order."""
    return (hash_key(seed, "generate", row, position) >> (63 - _BITS)) / 2**_BITS


def pick(logits: Tensor, sampling: Sampling, numbers: Tensor, num_ids: int | None = None) -> Tensor:
    """The next token of each row.

    Args:
        logits: [rows, vocabulary].
        numbers: [rows] in [0, 1), float64: where the distribution is cut. Not looked at by a greedy choice.
        num_ids: ids from this on stand for no text, and are not taken.

    Returns:
        ids [rows], int64; `NOT_A_NUMBER` in rows whose logits are not all numbers.
    """
    if num_ids is not None:
        logits = logits[:, :num_ids]
    if sampling.greedy:
        highest, ids = logits.max(-1)
        return ids.masked_fill_(highest.isnan(), NOT_A_NUMBER)
    heights = probabilities(logits, sampling).cumsum(-1)
    total = heights[:, -1:]
    ids = torch.searchsorted(heights, numbers.unsqueeze(-1) * total, right=True).squeeze(-1)
    return ids.masked_fill_(total.squeeze(-1).isnan(), NOT_A_NUMBER)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Of each token, [rows, vocabulary] in float64: 0 where top-k and top-p leave it out."""
    logits = logits.double()
    scores = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    found = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = found.sort(dim=-1, descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered  # of all tokens before each
        found = found.masked_fill(
            torch.zeros_like(found, dtype=torch.bool).scatter(-1, order, likelier >= sampling.top_p), 0
        )
        found = found / found.sum(-1, keepdim=True)
    return found
