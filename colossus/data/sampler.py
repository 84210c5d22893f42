"""The samples in the global batch of a step: a pure function of (seed, step). No torch, no state.

The samples of all epochs form one endless sequence: position ``p`` is sample ``permutation_of_epoch[p % n]`` of epoch
``p // n``. Step ``s`` takes the positions from ``BatchSizes.before(s)`` on. That is ``s * global_batch_size``, unless
the batch grows, or had another size when the run was saved. So a global batch may straddle two epochs, nothing is
dropped, and resuming at a step needs only its number and the number of samples before it.

The permutation of an epoch is never stored. It is a Feistel network with cycle walking (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002): a sample number is written as two digits in mixed radix, and each round adds a
keyed hash of one digit to the other. A value outside 0..n-1 is permuted again until it falls inside. With radices near
sqrt(n) the domain is larger than n by less than sqrt(n), so that a second pass is rare.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from colossus.arithmetic import either, nearest_multiples
from colossus.config.batch_sizes import BatchRamp, BatchSizes
from colossus.data.token_budget import TokenBudget
from colossus.random import seed_words

_ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)

IndexArray = np.ndarray[Any, np.dtype[np.int64]]
SamplesAt = Callable[[IndexArray], IndexArray]


@dataclass(frozen=True)
class BatchShard:
    """The contiguous shard of each global batch that one data rank reads: all that a source knows of the plan."""

    #: seed of the order of samples, and of random numbers that a user's data code draws
    seed: int
    #: samples of a batch over all data ranks
    global_batch_size: int
    data_rank: int
    #: divides ``global_batch_size``
    data_size: int
    #: whether reading starts over at the end of the data, as in training; in validation it ends
    endless: bool
    #: ramp of training batches that grow; each size divides by ``data_size``
    ramp: BatchRamp | None = None
    #: ``train.batch_dims``
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    #: see `BatchSizes`
    shift: int = 0
    #: budget of ``train.tokens_per_microbatch``; None: a data rank reads its span of the batch, see `span`
    budget: TokenBudget | None = None

    @functools.cached_property
    def sizes(self) -> BatchSizes:
        """Sizes of the global batch by step."""
        return BatchSizes(self.global_batch_size, self.ramp, self.shift)

    def resumed(self, state: Mapping[str, Any]) -> BatchShard:
        """Return the shard whose step of ``state`` begins after the samples that were read when it was saved."""
        here = self.sizes.before(state["step"])
        return replace(self, shift=self.shift + state.get("samples", here) - here)

    @property
    def size(self) -> int:
        """Samples of this data rank in a whole batch."""
        return self.global_batch_size // self.data_size

    def span(self, size: int) -> tuple[int, int]:
        """Return the (start, stop) of this data rank's samples in a global batch of this size.

        In a smaller last batch some data ranks may have a sample less, or none.
        """
        return size * self.data_rank // self.data_size, size * (self.data_rank + 1) // self.data_size

    @property
    def batch_size_name(self) -> str:
        """Name of ``global_batch_size`` in messages."""
        return "train.global_batch_size" if self.endless else "the validation batch size (train.eval_batch_size)"


class SampleOrder:
    """The samples in the batches of one data rank.

    In training they come from the endless sequence of all epochs, in validation from first to last. Many steps are
    computed at once, which takes as long as few.

    Args:
        shard: the shard of each batch.
        num_samples: samples of the dataset.
        samples_at: the order of a dataset that has one of its own (`Mix`), positions -> samples.
    """

    _AT_ONCE = 4096

    def __init__(self, shard: BatchShard, num_samples: int, samples_at: SamplesAt | None = None) -> None:
        self.shard, self.num_samples, self._samples_at = shard, num_samples, samples_at
        self._num_steps = max(1, min(self._AT_ONCE, num_samples) // shard.global_batch_size)
        #: number of a block of consecutive steps, and this data rank's samples of each step
        self._block: tuple[int, IndexArray] | None = None

    def size(self, step: int) -> int:
        """Return the samples of the global batch of a step."""
        whole = self.shard.sizes.at(step)
        return whole if self.shard.endless else min(whole, self.num_samples - step * whole)

    def span(self, step: int) -> tuple[int, int]:
        """Return the (start, stop) of this data rank's samples in the global batch of a step."""
        return self.shard.span(self.size(step))

    def indices(self, step: int, span: tuple[int, int]) -> IndexArray:
        """Return the samples of a step in a span of its global batch; in training the same span of each full batch."""
        sizes, places = self.shard.sizes, np.arange(*span)
        if not self.shard.endless:
            return sizes.before(step) + places
        if step < sizes.full_from:
            return self._shuffled(sizes.before(step) + places)
        block, row = divmod(step - sizes.full_from, self._num_steps)
        if self._block is None or self._block[0] != block:
            steps = block * self._num_steps + np.arange(self._num_steps)
            first = sizes.before(sizes.full_from) + steps[:, None] * sizes.full + places
            # a run that was resumed with a larger batch reads no step before that place
            self._block = block, self._shuffled(np.maximum(first, 0))
        return self._block[1][row]

    def _shuffled(self, places: IndexArray) -> IndexArray:
        """Return the samples at these positions of the endless sequence."""
        if self._samples_at is not None:
            return self._samples_at(places)
        epochs, positions = np.divmod(places, self.num_samples)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            samples[here] = permute(positions[here], self.num_samples, self.shard.seed, epoch)
        return samples

    def seeds(self, step: int, span: tuple[int, int], indices: IndexArray) -> list[int]:
        """Return a 63-bit seed for reading each of these samples: a function of (seed, epoch, index)."""
        epochs = (self.shard.sizes.before(step) + np.arange(*span)) // self.num_samples
        keys = np.array([_seed_key(self.shard.seed, epoch) for epoch in epochs.tolist()], np.uint64)
        seeds: list[int] = (_hash(indices.astype(np.uint64), keys) >> np.uint64(1)).tolist()
        return seeds


def local_batch_size(global_batch_size: int, data_size: int, what: str = "train.global_batch_size") -> int:
    """Return the samples of one data rank.

    Raises:
        ValueError: if the global batch is empty or does not divide; it names the nearest sizes that do.
    """
    if global_batch_size < 1:
        raise ValueError(f"{what} = {global_batch_size}: a batch needs at least one sample")
    if global_batch_size % data_size:
        near = either(nearest_multiples(global_batch_size, data_size))
        raise ValueError(
            f"{what} = {global_batch_size} does not divide over {data_size} data ranks "
            f"({global_batch_size} / {data_size} = {global_batch_size / data_size:.2f}); use {near}"
        )
    return global_batch_size // data_size


def permute(numbers: IndexArray, n: int, seed: int, epoch: int) -> IndexArray:
    """Return the image of ``numbers`` (any shape, within 0..n-1) under the permutation of (seed, epoch)."""
    keys = _round_keys(seed, epoch)
    high = math.isqrt(n - 1) + 1
    radices = np.uint64(high), np.uint64(-(-n // high))
    image = _feistel(numbers.astype(np.uint64), radices, keys)
    outside = image >= n
    while outside.any():
        image[outside] = _feistel(image[outside], radices, keys)
        outside = image >= n
    return image.astype(np.int64)


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(seed_words(seed, (0, epoch), _ROUNDS))  # 0 separates them from the keys of `derive_seeds`


@functools.lru_cache(maxsize=64)
def _seed_key(seed: int, epoch: int) -> np.uint64:
    return seed_words(seed, (2, epoch), 1)[0]


def _feistel(numbers: np.ndarray, radices: tuple[np.uint64, np.uint64], keys: tuple[np.uint64, ...]) -> np.ndarray:
    """Return one pass over 0..high*low-1; each round is a bijection, whatever its hash."""
    high, low = radices
    first, second = np.divmod(numbers, low)
    for number, key in enumerate(keys):
        if number % 2:
            second = (second + _hash(first, key) % low) % low
        else:
            first = (first + _hash(second, key) % high) % high
    return first * low + second


def _hash(values: np.ndarray, key: np.uint64 | np.ndarray) -> np.ndarray:
    """Return the finaliser of MurmurHash3 of ``values + key``; uint64 arithmetic wraps."""
    mixed = values + key
    for multiplier in _MULTIPLIERS:
        mixed ^= mixed >> _SHIFT
        mixed *= multiplier
    mixed ^= mixed >> _SHIFT
    return mixed
