"""Which samples make up the global batch of a step: a pure function of (seed, step). No torch, no state.

The samples of all epochs form one endless sequence: position ``p`` is sample ``permutation_of_epoch[p % n]`` of
epoch ``p // n``, and step ``s`` takes positions ``s * global_batch_size`` onwards. A global batch may thus
straddle two epochs, nothing is dropped, and resuming at any step needs no more than its number.

The permutation of an epoch is never stored. It is a Feistel network with cycle walking (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002): a sample number is written as two digits in mixed radix, each round
adds a keyed hash of one digit to the other, and a value outside 0..n-1 is sent through again until it
falls inside. With radices near sqrt(n) the domain is larger than n by less than sqrt(n), so that a second pass is rare.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from colossus.arithmetic import either, nearest_multiples
from colossus.random import seed_words

_ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)

IndexArray = np.ndarray[tuple[int], np.dtype[np.int64]]


def sample_indices(
    seed: int, step: int, num_samples: int, global_batch_size: int, data_rank: int = 0, data_size: int = 1
) -> IndexArray:
    """The samples that data rank ``data_rank`` of ``data_size`` reads at ``step``.

    Returns:
        ``[global_batch_size / data_size]`` int64, a contiguous slice of the global batch. The slices of all data ranks
        in order are the global batch, which does not depend on ``data_size``.

    Raises:
        ValueError: a negative seed or step, no samples, or a batch that does not divide over the data ranks.
    """
    if step < 0:
        raise ValueError(f"step = {step} is negative")
    if num_samples < 1:
        raise ValueError(f"the dataset has {num_samples} samples; training needs at least one")
    size = local_batch_size(global_batch_size, data_size)
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank = {data_rank} is outside 0..{data_size - 1}")
    first = step * global_batch_size + data_rank * size
    positions = first % num_samples + np.arange(size, dtype=np.int64)
    epochs, offsets = np.divmod(positions, num_samples)
    out = np.empty(size, dtype=np.int64)
    for epoch in range(int(epochs[-1]) + 1):
        here = epochs == epoch
        out[here] = permute(offsets[here], num_samples, seed, first // num_samples + epoch)
    return out


def local_batch_size(global_batch_size: int, data_size: int, what: str = "train.global_batch_size") -> int:
    """Samples of one data rank.

    Raises:
        ValueError: when the global batch is empty or does not divide; names the nearest sizes that do.
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
    """The image of ``numbers`` (any shape, within 0..n-1) under the permutation of 0..n-1 of (seed, epoch)."""
    keys = _round_keys(seed, epoch)
    high = math.isqrt(n - 1) + 1
    radices = np.uint64(high), np.uint64(-(-n // high))
    out = _feistel(numbers.astype(np.uint64), radices, keys)
    outside = out >= n
    while outside.any():
        out[outside] = _feistel(out[outside], radices, keys)
        outside = out >= n
    return out.astype(np.int64)


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(seed_words(seed, (0, epoch), _ROUNDS))  # 0: apart from the keys of `derive_seeds`


def _feistel(numbers: np.ndarray, radices: tuple[np.uint64, np.uint64], keys: tuple[np.uint64, ...]) -> np.ndarray:
    """One pass over 0..high*low-1; each round is a bijection whatever its hash is."""
    high, low = radices
    left, right = np.divmod(numbers, low)
    for number, key in enumerate(keys):
        if number % 2:
            right = (right + _hash(left, key) % low) % low
        else:
            left = (left + _hash(right, key) % high) % high
    return left * low + right


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finaliser of MurmurHash3 on ``values + key``; uint64 arithmetic wraps."""
    mixed = values + key
    for multiplier in _MULTIPLIERS:
        mixed ^= mixed >> _SHIFT
        mixed *= multiplier
    mixed ^= mixed >> _SHIFT
    return mixed
