"""Many of numpy's `SeedSequence` at once, which takes 10 us to make one: a seed for each sample of a stream.

The algorithm is O'Neill's ``seed_seq_fe128``, which numpy promises not to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from colossus.random import DATA_KEY, check_seed, derive_seeds

_POOL = 4
_WORD = 0xFFFFFFFF
_FILL, _FILL_STEP = 0x43B0D7E5, 0x931E8875
_OUT, _OUT_STEP = 0x8B51F9DD, 0x58F38DED
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)


def seeds_of_places(seed: int, key: Sequence[int], start: int, stop: int) -> list[int]:
    """``derive_seeds(seed, (*key, place))[0]`` for each place from ``start`` to ``stop``, all at once."""
    if stop > 1 << 32:
        return [derive_seeds(seed, (*key, place))[0] for place in range(start, stop)]
    check_seed(seed)
    words = _first_words(seed, (DATA_KEY, 1, *key), np.arange(start, stop, dtype=np.uint32))
    seeds: list[int] = (words >> np.uint64(1)).tolist()
    return seeds


def _first_words(entropy: int, key: Sequence[int], last: np.ndarray) -> np.ndarray:
    """``SeedSequence(entropy, spawn_key=(*key, x)).generate_state(1, uint64)`` for each ``x`` of ``last``.

    Args:
        last: ``[n]`` uint32.

    Returns:
        ``[n]`` uint64.
    """
    of_entropy = _words_of(entropy)
    of_entropy += [0] * (_POOL - len(of_entropy))
    known = of_entropy + [word for part in key for word in _words_of(part)]
    words = [np.full(last.shape, word, np.uint32) for word in known] + [last]
    hashed = _hasher(_FILL, _FILL_STEP)
    pool = [hashed(word) for word in words[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mixed(pool[target], hashed(pool[source]))
    for word in words[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mixed(pool[target], hashed(word))
    hashed = _hasher(_OUT, _OUT_STEP)
    low, high = hashed(pool[0]).astype(np.uint64), hashed(pool[1]).astype(np.uint64)
    words64: np.ndarray = low | high << np.uint64(32)
    return words64


def _words_of(number: int) -> list[int]:
    words = [number & _WORD]
    while number := number >> 32:
        words.append(number & _WORD)
    return words


def _hasher(constant: int, step: int) -> Callable[[np.ndarray], np.ndarray]:
    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * step & _WORD
        value = value * np.uint32(constant)
        return value ^ value >> _SHIFT

    return hashed


def _mixed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = left * _LEFT - right * _RIGHT
    return mixed ^ mixed >> _SHIFT
