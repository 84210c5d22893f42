"""Which tensors go into which file, when a file is to have no more than so many bytes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

#: what Hugging Face's tools split at
MAX_SHARD_BYTES = 5 * 10**9


def split_into_shards(items: Iterable[T], num_bytes: Callable[[T], int], most: int = MAX_SHARD_BYTES) -> list[list[T]]:
    """The items in their order, a new shard begun where one would grow beyond ``most``; a larger item is one alone.

    Raises:
        ValueError: ``most`` is not positive.
    """
    if most < 1:
        raise ValueError(f"files of at most {most} bytes: give 1 or more")
    shards: list[list[T]] = []
    filled = 0
    for item in items:
        size = num_bytes(item)
        if not shards or filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += size
    return shards
