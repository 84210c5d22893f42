"""Prompts continued token by token, all in step.

The first forward takes as many tokens as the shortest prompt has. From there on every row goes one token further in
each: a longer prompt gives its next one, where a shorter one takes the token that was chosen. So no row has padding,
and each is what it would be alone.
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

#: what stands for a token where the logits are not numbers
NOT_A_NUMBER = -1
#: bits of a random number
_BITS = 48


class Decoding:
    """Prompts on their way. Every rank of the model has one, and calls `step` equally often.

    Args:
        prompts: ids, at least one each.
        max_tokens: to make of each.
        stop: ids that end a row; they belong to it.
        num_ids: ids from this on are never taken.

    Attributes:
        tokens: of each row, the prompt included.
        model: what makes tokens.
        ended: why a row has ended ("max_tokens", "stop", "positions"); None while it goes on.
        cache: what this rank holds; None of a model that is called with whole sequences.

    Raises:
        ValueError: for prompts that are empty or too long, and for ids that the model has not.
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
        #: repeated from the first until the ranks that split a batch divide them
        self._rows = [row % len(prompts) for row in range(round_up(len(prompts), model.row_multiple))]
        self._seen, self._next = 0, min(self._lengths)
        self.cache = KeyValueCache() if model.can_cache else None

    @property
    def is_done(self) -> bool:
        return all(self.ended)

    def close(self) -> None:
        """Let go of the model."""
        self.model.close()

    def step(self) -> list[int | None]:
        """One forward: the new token of each row; None of those that have ended, or have a prompt left. Collective.

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
        taken = self.model.agree(len(self._rows), chosen).cpu().tolist()  # where the host waits, once for each token
        self._seen, self._next = position, position + 1
        return [self._take(row, position, token) for row, token in zip(range(len(self.tokens)), taken, strict=False)]

    def _token(self, row: int, column: int) -> int:
        tokens = self.tokens[row]  # a row that has ended goes on with its last token, which nobody sees
        return tokens[column] if column < len(tokens) else tokens[-1]

    def _take(self, row: int, position: int, token: int) -> int | None:
        if self.ended[row] is not None or position < self._lengths[row]:
            return None
        if token == NOT_A_NUMBER:
            raise FloatingPointError(
                f"the logits of prompt {row + 1} behind {position} tokens are not numbers (NaN): the weights are not, "
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
    """The tokens behind each prompt, without it; the options are those of `Decoding`. Collective."""
    decoding = Decoding(model, prompts, **options)
    while not decoding.is_done:
        decoding.step()
    return [tokens[len(prompt) :] for tokens, prompt in zip(decoding.tokens, prompts, strict=True)]


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
        left_out = torch.zeros_like(found, dtype=torch.bool).scatter(-1, order, likelier >= sampling.top_p)
        found = found.masked_fill(left_out, 0)
        found = found / found.sum(-1, keepdim=True)
    return found
