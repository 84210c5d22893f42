"""Prompts continued token by token. All rows of a batch walk their positions together.

The first forward takes as many tokens as the shortest prompt has. From there on every row goes one token further in
each: a longer prompt gives its next one, where a shorter one takes the token that was chosen. So no row has padding,
and each is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from colossus.inference.sampling import NOT_A_NUMBER, pick, uniform
from colossus.inference.sampling_options import Sampling
from colossus.inference.text_model import TextModel, padded_rows
from colossus.layers.kv_cache import KeyValueCache

#: room for as many tokens behind the prompt at first, where more are asked for
_FIRST_ROOM = 256
#: why a row has ended
MAX_TOKENS, STOP, POSITIONS = "max_tokens", "stop", "positions"


class Decoding:
    """Prompts on their way. Every rank of the model has one, and calls `step` equally often.

    Args:
        prompts: ids, at least one each.
        max_tokens: to make of each.
        stop: ids that end a row; they belong to it.
        num_ids: ids from this on are never taken.

    Attributes:
        tokens: of each row, the prompt included.
        ended: why a row has ended ("max_tokens", "stop", "positions"); None while it goes on.

    Raises:
        ValueError: for prompts that are empty or too long, and for ids that are none.
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
        self._model, self._max_tokens = model, max_tokens
        self._sampling, self._stop, self._num_ids = sampling or Sampling(), frozenset(stop), num_ids
        self.tokens = [list(map(int, prompt)) for prompt in prompts]
        self._lengths = [len(prompt) for prompt in self.tokens]
        for problem in _problems(self._lengths, max_tokens, model.num_positions):
            raise ValueError(problem)
        self.ended: list[str | None] = [None] * len(self.tokens)
        self._rows = padded_rows(len(self.tokens), model.row_multiple)
        self._seen, self._next = 0, min(self._lengths)
        longest = max(self._lengths) + max_tokens
        self._limit = longest if model.num_positions is None else min(longest, model.num_positions)
        self._cache: KeyValueCache | None = None
        if model.can_cache:
            self._cache = model.new_cache(min(self._limit, self._next + _FIRST_ROOM), self._limit)

    @property
    def is_done(self) -> bool:
        return all(self.ended)

    @property
    def cache(self) -> KeyValueCache | None:
        """What this rank holds of the tokens so far; None of a model that is called with whole sequences."""
        return self._cache

    def step(self) -> list[int | None]:
        """One forward: the new token of each row; None of those that have ended, or have a prompt left.

        Raises:
            ValueError: on all ranks, when logits are not numbers.
        """
        position = self._next
        columns = range(self._seen if self._cache is not None else 0, position)
        logits = self._model.logits(
            torch.tensor([[self._at(row, at) for at in columns] for row in self._rows]), self._cache
        )
        mine = None
        if logits is not None:
            rows = self._rows[self._model.rows(len(self._rows))]
            numbers = [0.0 if self._sampling.greedy else uniform(self._sampling.seed, row, position) for row in rows]
            on_device = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
            mine = pick(logits[:, -1], self._sampling, on_device, self._num_ids)
        chosen = self._model.agree(len(self._rows), mine).tolist()
        self._seen, self._next = position, position + 1
        return [self._take(row, position, chosen[row]) for row in range(len(self.tokens))]

    def _at(self, row: int, position: int) -> int:
        tokens = self.tokens[row]  # a row that has ended goes on with its last token, which nobody sees
        return tokens[position] if position < len(tokens) else tokens[-1]

    def _take(self, row: int, position: int, token: int) -> int | None:
        if self.ended[row] is not None or position < self._lengths[row]:
            return None
        if token == NOT_A_NUMBER:
            raise ValueError(
                f"the logits of row {row} behind {position} tokens are not numbers (NaN): the weights are not, or "
                f"they overflow in this precision (train.precision=fp32 overrides it)"
            )
        tokens = self.tokens[row]
        tokens.append(token)
        if token in self._stop:
            self.ended[row] = STOP
        elif len(tokens) - self._lengths[row] >= self._max_tokens:
            self.ended[row] = MAX_TOKENS
        elif self._model.num_positions is not None and len(tokens) > self._model.num_positions:
            self.ended[row] = POSITIONS
        return token


def generate(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    num_ids: int | None = None,
) -> list[list[int]]:
    """The tokens behind each prompt, without it; the arguments are those of `Decoding`. Collective."""
    decoding = Decoding(model, prompts, max_tokens=max_tokens, sampling=sampling, stop=stop, num_ids=num_ids)
    for _ in steps(decoding):
        pass
    return [tokens[len(prompt) :] for tokens, prompt in zip(decoding.tokens, prompts, strict=True)]


def steps(decoding: Decoding) -> Iterator[list[int | None]]:
    """What each step gives, until every row has ended."""
    while not decoding.is_done:
        yield decoding.step()


def _problems(lengths: Sequence[int], max_tokens: int, num_positions: int | None) -> Iterator[str]:
    if not lengths:
        yield "there is no prompt"
    for row, length in enumerate(lengths):
        if not length:
            yield f"prompt {row} is empty: a model continues at least one token"
        if num_positions is not None and length > num_positions:
            yield f"prompt {row} has {length} tokens, but the model has learned {num_positions} positions: cut it"
    if max_tokens < 1:
        yield f"max_tokens = {max_tokens}: at least 1"
