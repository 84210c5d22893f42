"""Prompts continued token by token. Rows of about the same length walk their positions together.

The first forward takes as many tokens as the shortest prompt of them has. From there on every row goes one token
further in each: a longer prompt gives its next one, where a shorter one takes the token that was chosen. So no row has
padding, and each is what it would be alone. Where lengths are further apart than the tokens to make (`batches`), the
longer ones are a batch of their own, which begins when the one before has ended: that takes fewer forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import torch

from colossus.inference.sampling import NOT_A_NUMBER, pick, uniform
from colossus.inference.sampling_options import Sampling
from colossus.inference.text_model import TextModel, padded_rows
from colossus.layers.kv_cache import KeyValueCache

#: room for as many tokens behind the prompt at first, where more are asked for
_FIRST_ROOM = 256
#: why a row has ended
MAX_TOKENS, STOP, POSITIONS = "max_tokens", "stop", "positions"


class DecodingFailed(RuntimeError):
    """The model gives no next token; why in one line."""


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
        fed: how many tokens of prompts the last step took, and how many that were made before.

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
        self._model, self._max_tokens = model, max_tokens
        self._sampling, self._stop, self._num_ids = sampling or Sampling(), frozenset(stop), num_ids
        self.tokens = [list(map(int, prompt)) for prompt in prompts]
        self._lengths = [len(prompt) for prompt in self.tokens]
        for problem in _problems(self.tokens, max_tokens, model):
            raise ValueError(problem)
        self.ended: list[str | None] = [None] * len(self.tokens)
        self.fed = 0, 0
        self._batches = batches(self._lengths, max_tokens)
        self._begin(self._batches.pop(0))

    def _begin(self, batch: list[int]) -> None:
        model, lengths = self._model, [self._lengths[row] for row in batch]
        self._batch = batch
        self._rows = [batch[index] for index in padded_rows(len(batch), model.row_multiple)]
        self._seen, self._next = 0, min(lengths)
        longest = max(lengths) + self._max_tokens
        limit = longest if model.num_positions is None else min(longest, model.num_positions)
        self._cache: KeyValueCache | None = None
        if model.can_cache:
            self._cache = model.new_cache(min(limit, self._next + _FIRST_ROOM), limit)

    @property
    def is_done(self) -> bool:
        return all(self.ended)

    @property
    def cache(self) -> KeyValueCache | None:
        """What this rank holds of the batch at work; None of a model that is called with whole sequences."""
        return self._cache

    def step(self) -> list[int | None]:
        """One forward: the new token of each row; None of those that have ended, or have a prompt left.

        Raises:
            DecodingFailed: on all ranks when logits are not numbers, on one when the model looks up what is not there.
        """
        if all(self.ended[row] is not None for row in self._batch):
            self._begin(self._batches.pop(0))
        position = self._next
        columns = range(self._seen if self._cache is not None else 0, position)
        ids = torch.tensor([[self._at(row, at) for at in columns] for row in self._rows])
        try:
            logits = self._model.logits(ids, self._cache)
        except IndexError as error:
            told = " ".join(" ".join([str(error), *getattr(error, "__notes__", ())]).split())
            raise DecodingFailed(
                f"on {position} tokens, after {self._seen} without a fault, the model raised IndexError: {told}; does "
                f"it look up positions of its own, and has no more of them?"
            ) from error
        self.fed = self._count(position)
        mine = None
        if logits is not None:
            rows = self._rows[self._model.rows(len(self._rows))]
            numbers = [0.0 if self._sampling.greedy else uniform(self._sampling.seed, row, position) for row in rows]
            on_device = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)
            mine = pick(logits[:, -1], self._sampling, on_device, self._num_ids)
        chosen = self._model.agree(len(self._rows), mine).cpu().tolist()  # where the host waits, once for each token
        self._seen, self._next = position, position + 1
        taken: list[int | None] = [None] * len(self.tokens)
        for index, row in enumerate(self._batch):
            taken[row] = self._take(row, position, chosen[index])
        return taken

    def _count(self, position: int) -> tuple[int, int]:
        """Of the tokens that this step adds, those of prompts, and others; rows that have ended add none."""
        alive = [row for row in self._batch if self.ended[row] is None]
        of_prompts = sum(max(0, min(self._lengths[row], position) - self._seen) for row in alive)
        return of_prompts, len(alive) * (position - self._seen) - of_prompts

    def _at(self, row: int, position: int) -> int:
        tokens = self.tokens[row]  # a row that has ended goes on with its last token, which nobody sees
        return tokens[position] if position < len(tokens) else tokens[-1]

    def _take(self, row: int, position: int, token: int) -> int | None:
        if self.ended[row] is not None or position < self._lengths[row]:
            return None
        if token == NOT_A_NUMBER:
            raise DecodingFailed(
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


def batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows that walk together, so that there are the fewest forwards; in the order of the first of each.

    A batch takes as many as its lengths are apart, and then ``max_tokens``. So lengths that follow one another are of
    two batches where more than ``max_tokens`` lie between them.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    found = [[order[0]]]
    for last, row in pairwise(order):
        if lengths[row] - lengths[last] > max_tokens:
            found.append([])
        found[-1].append(row)
    return sorted(map(sorted, found))


def _problems(prompts: Sequence[Sequence[int]], max_tokens: int, model: TextModel) -> Iterator[str]:
    positions, ids = model.num_positions, model.vocab_size
    if not prompts:
        yield "there is no prompt"
    for row, prompt in enumerate(prompts):
        if not prompt:
            yield f"prompt {row} is empty: a model continues at least one token"
        if positions is not None and len(prompt) > positions:
            yield f"prompt {row} has {len(prompt)} tokens, but the model has learned {positions} positions: cut it"
        wrong = [each for each in prompt if each < 0 or (ids is not None and each >= ids)]
        if wrong:
            has = f"0..{ids - 1}" if ids is not None else "0 and above"
            yield f"prompt {row} has the token {wrong[0]}, but the model has the tokens {has}"
    if max_tokens < 1:
        yield f"max_tokens = {max_tokens}: at least 1"
