"""Decoding: prompts continued token by token, all rows in step.

The first forward takes as many tokens as the shortest prompt has. From there on every row advances one token in each
forward: a longer prompt takes its own next token, a shorter one the sampled token. So no row has padding, and each row
has the result that it would have alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.arithmetic import round_up
from colossus.inference.config import Sampling, prompt_problems
from colossus.inference.model import TextModel
from colossus.layers.kv_cache import KeyValueCache
from colossus.random import hash_key

#: the id in place of a token where the logits are not numbers
NOT_A_NUMBER = -1
#: bits of a random number
_BITS = 48


class Decoding:
    """The state of prompts that are continued. Every rank of the model has one, and calls `step` equally often.

    Args:
        prompts: ids, at least one each.
        max_tokens: the most new tokens of each.
        stop: ids that end a row; they belong to it.
        num_ids: ids from this on are never sampled.

    Attributes:
        tokens: the tokens of each row, with the prompt.
        model: the model that predicts tokens.
        ended: the reason why a row has ended ("max_tokens", "stop", "positions"); None while it continues.
        cache: this rank's keys and values; None for a model that takes whole sequences.

    Raises:
        ValueError: a prompt is empty or too long, or has an id outside the vocabulary.
    """

    def __init__(
        self,
        model: TextModel,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Collection[int] = (),
        num_ids: int | None = None,
    ) -> None:
        if problems := prompt_problems(prompts, model.num_positions, model.vocab_size):
            raise ValueError("\n".join(problems))
        self.model, self._max_tokens = model, max_tokens
        self._sampling, self._stop, self._num_ids = sampling or Sampling(), frozenset(stop), num_ids
        self.tokens = [list(map(int, prompt)) for prompt in prompts]
        self._lengths = [len(prompt) for prompt in self.tokens]
        self.ended: list[str | None] = [None] * len(self.tokens)
        #: the prompt of each row; prompts repeat until the ranks that split a batch divide the rows
        self._rows = [row % len(prompts) for row in range(round_up(len(prompts), model.row_multiple))]
        self._seen, self._next = 0, min(self._lengths)
        self.cache = KeyValueCache() if model.can_cache else None

    @property
    def is_done(self) -> bool:
        return all(self.ended)

    def close(self) -> None:
        """Release the model."""
        self.model.close()

    def step(self) -> list[int | None]:
        """Run one forward and return the new token of each row, None for ended rows and unfinished prompts. Collective.

        Raises:
            FloatingPointError: on all ranks, when logits are not numbers.
        """
        position = self._next
        columns = range(self._seen if self.cache is not None else 0, position)
        ids = torch.tensor([[self._token(row, column) for column in columns] for row in self._rows])
        logits, chosen = self.model.logits(ids, self.cache), None
        if logits is not None:
            rows = self._rows[self.model.rows(len(self._rows))]
            numbers = [0.0 if self._sampling.greedy else uniform(self._sampling.seed, row, position) for row in rows]
            on_device = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)
            chosen = pick(logits[:, -1], self._sampling, on_device, self._num_ids)
        agreed = (
            self.model.agree(len(self._rows), chosen).cpu().tolist()
        )  # the one place of a step where the host waits
        self._seen, self._next = position, position + 1
        return [self._take(row, position, token) for row, token in zip(range(len(self.tokens)), agreed, strict=False)]

    def _token(self, row: int, column: int) -> int:
        tokens = self.tokens[row]  # a row that has ended continues with its last token, and the result is dropped
        return tokens[column] if column < len(tokens) else tokens[-1]

    def _take(self, row: int, position: int, token: int) -> int | None:
        if self.ended[row] is not None or position < self._lengths[row]:
            return None
        if token == NOT_A_NUMBER:
            raise FloatingPointError(
                f"the logits of prompt {row + 1} after {position} tokens are not numbers (NaN): the weights are not, "
                f"or they overflow in this precision (train.precision=fp32 overrides it)"
            )
        tokens = self.tokens[row]
        tokens.append(token)
        if token in self._stop:
            self.ended[row] = "stop"
        elif len(tokens) - self._lengths[row] >= self._max_tokens:
            self.ended[row] = "max_tokens"
        elif self.model.num_positions is not None and len(tokens) > self.model.num_positions:
            self.ended[row] = "positions"
        return token


def generate(model: TextModel, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return the tokens behind each prompt, without it; the options are those of `Decoding`. Collective."""
    decoding = Decoding(model, prompts, **options)
    while not decoding.is_done:
        decoding.step()
    return [tokens[len(prompt) :] for tokens, prompt in zip(decoding.tokens, prompts, strict=True)]


def uniform(seed: int, row: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on its arguments: it is the same under every plan, in every order."""
    return (hash_key(seed, "generate", row, position) >> (63 - _BITS)) / 2**_BITS


def pick(logits: Tensor, sampling: Sampling, numbers: Tensor, num_ids: int | None = None) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: [rows, vocabulary].
        numbers: [rows] in [0, 1), float64: the point of the cumulative distribution to take. A greedy choice ignores
            it.
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
    """Return the probability of each token, [rows, vocabulary] in float64; 0 where top-k and top-p exclude it."""
    logits = logits.double()
    scores = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    result = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = result.sort(dim=-1, descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered  # the sum over all likelier tokens
        left_out = torch.zeros_like(result, dtype=torch.bool).scatter(-1, order, likelier >= sampling.top_p)
        result = result.masked_fill(left_out, 0)
        result = result / result.sum(-1, keepdim=True)
    return result
