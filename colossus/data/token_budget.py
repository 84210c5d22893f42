"""Microbatches of a budget of tokens: which samples of a step share one. No torch, no state.

The samples of a step are those of any other run: budgets choose no samples, they only cut a step. The cut is a pure
function of the lengths of all samples of the global batch, so each rank knows that of all others, and all have equally
many microbatches. Samples of near lengths share one, and the microbatches that ranks run at the same time are alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colossus.arithmetic import round_up
from colossus.config import Config, model_options
from colossus.layout.activation import Activation
from colossus.registry import SEQUENCE_MODES, TENSOR_MODES
from colossus.sequence_parallel.modes import length_multiple

Lengths = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class TokenBudget:
    """The budget of a run, and what its plan asks of the shape of a microbatch.

    Attributes:
        tokens: most tokens of a microbatch of one data rank, with its padding.
        sample_multiple: number that divides the samples of a microbatch, where tensor ranks split them.
        length_multiple: number that divides its length, where sequence or tensor ranks split it.
        least: fewest microbatches of a step.
    """

    tokens: int
    sample_multiple: int = 1
    length_multiple: int = 1
    least: int = 1

    def shape(self, lengths: Lengths) -> tuple[int, int]:
        """Return the (rows, tokens of each) of a microbatch of samples of these lengths, with its padding."""
        longest = int(lengths.max(initial=1))
        return round_up(max(1, len(lengths)), self.sample_multiple), round_up(longest, self.length_multiple)

    def cut(self, lengths: Lengths, data_size: int) -> list[list[Lengths]]:
        """Return for each data rank its microbatches, each the places [n] of its samples in the global batch.

        Ranks have equally many. A microbatch is empty if there are fewer samples than microbatches. Rounding a length
        up does not change the order by length, so the longest sample that is left takes as many of the next as fit.

        Args:
            lengths: [samples] of the global batch.
            data_size: number of data ranks.
        """
        order = np.argsort(-lengths, kind="stable")
        parts, start = [], 0
        while start < len(order):
            _, longest = self.shape(lengths[order[start : start + 1]])
            count = max(1, self.tokens // longest // self.sample_multiple * self.sample_multiple)
            parts.append(order[start : start + count])
            start += count
        number = max(self.least, -(-len(parts) // data_size))
        parts = self._divided(parts, lengths, number * data_size)
        parts.sort(key=lambda places: self._cost(lengths[places]), reverse=True)  # stable
        ranks: list[list[Lengths]] = [[] for _ in range(data_size)]
        for slot in range(number):
            own = parts[slot * data_size : (slot + 1) * data_size]
            # to and fro, so that no rank has the largest of each slot
            for rank, places in zip(ranks, own if slot % 2 == 0 else own[::-1], strict=True):
                rank.append(np.sort(places))
        return ranks

    def _cost(self, lengths: Lengths) -> int:
        rows, tokens = self.shape(lengths)
        return rows * tokens if len(lengths) else 0

    def _divided(self, parts: Sequence[Lengths], lengths: Lengths, number: int) -> list[Lengths]:
        """Return ``number`` parts: the largest are halved, and empty ones come last."""
        heap = [(-self._cost(lengths[places]) * (len(places) > 1), index, places) for index, places in enumerate(parts)]
        heapq.heapify(heap)
        count = len(heap)
        while heap and len(heap) < number and heap[0][0]:
            _, _, places = heapq.heappop(heap)
            for half in (places[: -(-len(places) // 2)], places[-(-len(places) // 2) :]):
                heapq.heappush(heap, (-self._cost(lengths[half]) * (len(half) > 1), count, half))
                count += 1
        divided = [places for _, _, places in sorted(heap, key=lambda entry: entry[1])]
        return divided + [np.empty(0, np.int64)] * (number - len(divided))


def budget_of(config: Config) -> TokenBudget | None:
    """Return the budget of a config whose plan fits, None if it sets none.

    Raises:
        ValueError: if the loss of the model needs more than a microbatch.
    """
    train, tensor, sequence = config.train, config.parallel.tensor, config.parallel.sequence
    if train.tokens_per_microbatch is None:
        return None
    options, key = model_options(config), f"train.tokens_per_microbatch = {train.tokens_per_microbatch}"
    if getattr(options, "counted", "") == "pairs":
        raise ValueError(f"{key} cuts a step by single samples, but model.objective compares pairs: leave it out")
    if getattr(options, "mtp_weight", 0):
        raise ValueError(f"{key} and model.mtp_weight, whose loss counts the labels of a step before it: keep one")
    mode = TENSOR_MODES.get(tensor.mode)
    sizes = mode.axis_sizes(tensor.size, tensor.depth, tensor.shape)
    regions = mode.regions(Activation(), sequence_sharded=tensor.sequence_sharded)
    token_ways = sequence.size * math.prod(sizes[axis] for axis in regions.residual.tokens)
    ring, ulysses = SEQUENCE_MODES.get(sequence.mode or "ring").ways(sequence.size, sequence.ulysses)
    multiple = math.lcm(length_multiple(ring, ulysses, sequence.chunks), token_ways)
    return TokenBudget(train.tokens_per_microbatch, mode.batch_ways(sizes), multiple, config.schedule.microbatches)


def lengths_of(dataset: Any, name: str, budget: TokenBudget) -> Lengths:
    """Return the lengths of all samples of a dataset, [samples].

    Raises:
        ValueError: if the dataset does not say them, or a sample is longer than the budget.
    """
    token_counts = getattr(dataset, "lengths", None)
    if token_counts is None:
        raise ValueError(
            f"train.tokens_per_microbatch = {budget.tokens}, but {name} has no attribute `lengths`, the tokens of each "
            f"sample, [samples]: add it, or cut a step into equal microbatches by schedule.microbatches"
        )
    lengths = np.asarray(token_counts)
    if lengths.shape != (len(dataset),) or lengths.dtype.kind not in "iu" or (len(lengths) and lengths.min() < 1):
        what = f"{lengths.dtype}{list(lengths.shape)}" + (f" from {lengths.min()} on" if lengths.size else "")
        raise ValueError(f"{name}.lengths is {what}: it has a number of tokens, 1 or more, for each of {len(dataset)}")
    lengths = lengths.astype(np.int64, copy=False)
    longest = int(lengths.argmax())
    _, tokens = budget.shape(lengths[longest : longest + 1])
    if tokens * budget.sample_multiple > budget.tokens:
        padded = "" if tokens == lengths[longest] else f", padded to {tokens}"
        ways = budget.sample_multiple
        split = "" if ways == 1 else f", and a microbatch has {ways} samples at least, which tensor ranks split"
        raise ValueError(
            f"train.tokens_per_microbatch = {budget.tokens}: sample {longest} of {name} has {lengths[longest]} "
            f"tokens{padded}{split}: set it to {tokens * ways} or more, or use shorter samples"
        )
    return lengths
