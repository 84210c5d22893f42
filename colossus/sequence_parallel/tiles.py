"""The tiles of attention of a block of queries to a block of keys.

A block of scores is what the queries of one ring rank make with the keys of another; both ranks hold a head and a tail
chunk (see `colossus.sequence_parallel.modes`). Under a causal mask there are three kinds of blocks, each of one kernel
call and of the same work: keys of the same rank (causal as they lie, for the head comes before the tail), keys of an
earlier rank (all queries see its head, none its tail), keys of a later one (the tail sees all, the head nothing).

Documents and windows are cut finer, so that no mask is larger than a tile. Tiles outside of a window are left out; on
CPU, where the host can read documents at no cost, so are tiles that they mask out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

#: tokens of a tile: large enough that a kernel call costs little beside its work
TILE = 512
#: where documents are not read nothing is skipped for being small: fewer calls, masks of at most 4 MB a sample
MASKED_TILE = 2048


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """One kernel call.

    Attributes:
        queries: rows of the local queries.
        keys: rows of the keys of the block.
        causal: whether query i of the tile sees the keys up to i only; then there is no mask.
        mask: [batch or 1, 1, queries, keys], True where a query may look, or None.
    """

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


def attention_tiles(
    num_tokens: int,
    ring: int,
    query_rank: int,
    key_rank: int,
    causal: bool,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    *,
    window: int | None = None,
    device: torch.device | None = None,
) -> Iterator[AttentionTile]:
    """Yield the tiles of one block that are computed.

    Every query sees itself, in a tile of the block of its own rank's keys.

    Args:
        num_tokens: queries, and keys, of the block: the tokens of one rank.
        ring: number of ring ranks.
        query_rank, key_rank: their indices in the ring.
        documents: [batch, num_tokens], numbers of the queries' documents; a query sees keys of the same number only.
        key_documents: the same of the keys.
        window: a query sees itself and the ``window - 1`` tokens before it; only where ``causal``.
        device: device of the masks at the edge of a window.
    """
    is_read = documents is None or can_be_read(documents)
    if documents is None or key_documents is None or (is_read and _is_one_document(documents, key_documents)):
        documents = key_documents = None
        if window is None:
            yield from _tiles_of_one_document(num_tokens, query_rank, key_rank, causal)
        else:
            yield from _tiles_of_a_window(num_tokens, ring, query_rank, key_rank, window, device)
        return
    size = TILE if is_read else MASKED_TILE
    pairs = product(_ranges(num_tokens, ring, query_rank, size), _ranges(num_tokens, ring, key_rank, size))
    for (queries, query_start), (keys, key_start) in pairs:
        offset = query_start - key_start
        if causal and offset < 0:
            continue
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        if window is not None and offset - num_keys + 1 >= window:
            continue
        mask = None
        if documents is not None and key_documents is not None:
            mask = documents[:, None, queries, None] == key_documents[:, None, None, keys]
            if is_read and not mask.any():
                continue
            if is_read and mask.all():
                mask = None
        if window is not None and offset + num_queries > window:
            near = _near(num_queries, num_keys, offset, window, device)
            mask = near if mask is None else mask & near
        elif mask is not None and causal and offset == 0:
            mask = mask.tril()
        yield AttentionTile(queries, keys, causal and offset == 0 and mask is None, mask)


def needed_steps(num_tokens: int, ring: int, window: int | None) -> list[int]:
    """Return how far before a rank in the ring those are whose keys any rank needs: 0 for its own, and rising.

    Args:
        num_tokens: tokens of one rank, half of them in its early chunk.
        ring: number of ring ranks.
        window: see `attention_tiles`.
    """
    if window is None or ring == 1:
        return list(range(ring))
    reach = -(-(window - 1) // (num_tokens // 2))
    rank_of = [min(chunk, 2 * ring - 1 - chunk) for chunk in range(2 * ring)]
    return sorted(
        {
            (rank_of[chunk] - rank_of[before]) % ring
            for chunk in range(2 * ring)
            for before in range(max(0, chunk - reach), chunk + 1)
        }
    )


def _tiles_of_one_document(num_tokens: int, query_rank: int, key_rank: int, causal: bool) -> Iterator[AttentionTile]:
    everything, half = slice(0, num_tokens), num_tokens // 2
    if not causal or query_rank == key_rank:
        yield AttentionTile(everything, everything, causal)
    elif key_rank < query_rank:
        yield AttentionTile(everything, slice(0, half))
    else:
        yield AttentionTile(slice(half, num_tokens), everything)


def _tiles_of_a_window(
    num_tokens: int, ring: int, query_rank: int, key_rank: int, window: int, device: torch.device | None
) -> Iterator[AttentionTile]:
    """Yield at most three tiles for some queries and a chunk of keys: before, in and behind what all of them see."""
    size = min(MASKED_TILE, max(TILE, window))
    for queries, first in _ranges(num_tokens, ring, query_rank, size):
        num_queries = queries.stop - queries.start
        for chunk, start in _ranges(num_tokens, ring, key_rank, num_tokens):
            seen = max(first - window + 1, start), min(first + num_queries, start + chunk.stop - chunk.start)
            common = first + num_queries - window, first
            bounds = [seen[0], *(min(max(bound, seen[0]), seen[1]) for bound in common), seen[1]]
            if common[0] > common[1]:  # no key is seen by all
                bounds = list(seen)
            for low, high in pairwise(bounds):
                if low >= high:
                    continue
                keys = slice(chunk.start + low - start, chunk.start + high - start)
                is_diagonal = (low, high) == (first, first + num_queries) and num_queries <= window
                mask = None
                if not is_diagonal and not common[0] <= low < high <= first + 1:
                    mask = _near(num_queries, high - low, first - low, window, device)
                yield AttentionTile(queries, keys, is_diagonal, mask)


def _near(num_queries: int, num_keys: int, offset: int, window: int, device: torch.device | None) -> Tensor:
    """Return [1, 1, queries, keys], True where a key is at most ``window`` - 1 tokens before a query.

    Args:
        offset: position of the first query minus that of the first key.
    """
    near = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    return near.tril_(offset).triu_(offset - window + 1)


def _ranges(num_tokens: int, ring: int, rank: int, size: int) -> list[tuple[slice, int]]:
    """Return a rank's tokens in ranges of at most ``size``: (rows, position of the first in the sequence)."""
    chunk, chunks = (num_tokens // 2, (rank, 2 * ring - 1 - rank)) if ring > 1 else (num_tokens, (0,))
    return [
        (slice(place * chunk + start, place * chunk + min(start + size, chunk)), number * chunk + start)
        for place, number in enumerate(chunks)
        for start in range(0, chunk, size)
    ]


def can_be_read(documents: Tensor) -> bool:
    """Return whether the host can read these numbers without waiting for a device."""
    return documents.device.type == "cpu"


def _is_one_document(documents: Tensor, key_documents: Tensor) -> bool:
    """Return whether in every sample all these tokens belong to one document."""
    first = documents[:, :1]
    return torch.equal(documents, first.expand_as(documents)) and torch.equal(key_documents, first.expand_as(documents))
