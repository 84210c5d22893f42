"""The tiles of attention of a block of queries to a block of keys.

A block of scores is what the queries of one ring rank make with the keys of another; both ranks hold a head and a tail
chunk (see `colossus.sequence_parallel.modes`). Under a causal mask there are three kinds of blocks, each of one kernel
call and of the same work: keys of the same rank (causal as they lie, for the head comes before the tail), keys of an
earlier rank (all queries see its head, none its tail), keys of a later one (the tail sees all, the head nothing).

Any other mask gives a tile of queries a range of keys, since it gives each query a range of positions and a rank's
tokens lie in their order: those that all queries see need no mask, those before and behind them do. Documents are cut
finer, so that no mask is larger than a tile; on CPU, where the host can read documents at no cost, tiles that they mask
out are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import torch
from torch import Tensor

from colossus.sequence_parallel.mask import CAUSAL, FULL, Mask
from colossus.sequence_parallel.modes import chunks_of

#: tokens of a tile: large enough that a kernel call costs little beside its work
TILE = 512
#: on devices, where documents are not read: fewer calls, and masks of at most 4 MB a sample
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


@dataclass(frozen=True)
class RingTokens:
    """The tokens of each rank of a ring, ``num_tokens`` in an even number of chunks; one rank has one chunk."""

    num_tokens: int
    ring: int
    chunks: int = 2

    @property
    def chunk_size(self) -> int:
        return self.num_tokens // self.chunks if self.ring > 1 else self.num_tokens

    def starts(self, rank: int) -> list[int]:
        """Return the position of the first token of each of a rank's chunks."""
        return [number * self.chunk_size for number in chunks_of(rank, self.ring, self.chunks)]

    def ranges(self, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield a rank's tokens in ranges of at most ``size``: (first row, number of rows, position of the first)."""
        for place, start in enumerate(self.starts(rank)):
            for offset in range(0, self.chunk_size, size):
                yield place * self.chunk_size + offset, min(size, self.chunk_size - offset), start + offset

    def row(self, rank: int, position: int) -> int:
        """Return the number of a rank's tokens that come before a position."""
        starts = self.starts(rank)
        place = max(0, bisect_left(starts, position + 1) - 1)
        return place * self.chunk_size + min(max(position - starts[place], 0), self.chunk_size)

    def positions(self, rank: int, device: torch.device | None) -> Tensor:
        """Return the position of each of a rank's tokens, [num_tokens]."""
        return torch.cat([torch.arange(start, start + self.chunk_size, device=device) for start in self.starts(rank)])


def attention_tiles(
    mask: Mask,
    tokens: RingTokens,
    query_rank: int,
    key_rank: int,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    *,
    largest: int | None = None,
    device: torch.device | None = None,
) -> Iterator[AttentionTile]:
    """Yield the tiles of one block that are computed.

    Every query sees itself, in a tile of the block of its own rank's keys.

    Args:
        mask: what a query sees.
        tokens: the tokens of a rank.
        query_rank, key_rank: the indices in the ring of the ranks with the queries and with the keys.
        documents: [batch, tokens], numbers of the queries' documents; a query sees keys of the same number only.
        key_documents: the same of the keys.
        largest: the most queries and keys of a tile, for a kernel that stores its scores; by default a tile is as large
            as its mask allows.
        device: device of the masks.
    """
    is_read = documents is None or can_be_read(documents)
    if documents is None or key_documents is None or (is_read and _is_one_document(documents, key_documents)):
        documents = key_documents = None
    mask = mask.within(tokens.num_tokens * tokens.ring)
    if documents is None and mask in (CAUSAL, FULL) and (largest or tokens.num_tokens) >= tokens.num_tokens:
        yield from _unmasked_tiles(mask, tokens, query_rank, key_rank)
        return
    if documents is None:
        is_host = device is None or device.type == "cpu"  # where a masked score costs what a seen one does
        size = TILE if is_host else min(MASKED_TILE, max(TILE, min(mask.left + 1, mask.chunk_size)))
        piece = tokens.num_tokens
    else:
        size = piece = TILE if is_read else MASKED_TILE
    size, piece = (min(one, largest or one) for one in (size, piece))
    query_positions, key_positions = (tokens.positions(rank, device) for rank in (query_rank, key_rank))
    for row, count, first in tokens.ranges(query_rank, size):
        queries = slice(row, row + count)
        for keys, is_seen_by_all in _key_ranges(mask, tokens, first, count, key_rank, piece):
            same = None
            if documents is not None and key_documents is not None:
                same = documents[:, None, queries, None] == key_documents[:, None, None, keys]
                if is_read and not same.any():
                    continue
                if is_read and same.all():
                    same = None
            is_triangle = query_rank == key_rank and keys == queries and mask.is_causal
            if same is None and is_triangle and mask.first(first + count - 1) <= first:
                yield AttentionTile(queries, keys, causal=True)
                continue
            if not is_seen_by_all:
                seen = visible(mask, query_positions[queries], key_positions[keys])[None, None]
                same = seen if same is None else same & seen
            yield AttentionTile(queries, keys, mask=same)


def visible(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return [queries, keys], True where a query at one position sees a key at another, of the same document."""
    start = queries - queries % mask.chunk_size
    first = torch.maximum(queries - mask.left, start)
    last = torch.minimum(queries + mask.right, start + mask.chunk_size - 1)
    last = torch.minimum(last, queries.clamp(min=mask.prefix_size - 1))
    return (keys >= first[:, None]) & (keys <= last[:, None])


@lru_cache
def needed_steps(mask: Mask, tokens: RingTokens) -> tuple[int, ...]:
    """Return how far before a rank in the ring those are whose keys any rank needs: 0 for its own, and rising."""
    ring, size = tokens.ring, tokens.chunk_size
    rank_of = {start // size: rank for rank in range(ring) for start in tokens.starts(rank)}
    steps = set()
    for chunk, rank in rank_of.items():
        first = mask.first(chunk * size) // size
        last = min(mask.last((chunk + 1) * size - 1) // size, len(rank_of) - 1)
        steps |= {(rank - rank_of[other]) % ring for other in range(first, last + 1)}
    return tuple(sorted(steps))


def _unmasked_tiles(mask: Mask, tokens: RingTokens, query_rank: int, key_rank: int) -> Iterator[AttentionTile]:
    """Yield the tiles of a causal or a full mask of one document; chunks that see as many keys are one tile."""
    if mask == FULL or query_rank == key_rank:
        everything = slice(0, tokens.num_tokens)
        yield AttentionTile(everything, everything, mask == CAUSAL)
        return
    rows = [tokens.row(key_rank, start) for start in tokens.starts(query_rank)]
    for count, places in groupby(range(len(rows)), key=rows.__getitem__):
        first, *others = places
        if count:
            queries = slice(first * tokens.chunk_size, (first + len(others) + 1) * tokens.chunk_size)
            yield AttentionTile(queries, slice(0, count))


def _key_ranges(
    mask: Mask, tokens: RingTokens, first: int, count: int, key_rank: int, size: int
) -> Iterator[tuple[slice, bool]]:
    """Yield rows of keys of which ``count`` queries see some, at most ``size``, and whether all queries see them all.

    They are cut before and behind those that all queries see.

    Args:
        first: position of the first query.
    """
    last = first + count - 1
    # the keys of causal queries themselves are one range, for which kernels have a flag
    common_end = first if mask.is_causal else mask.last(first) + 1
    ends = (mask.first(first), mask.first(last), common_end, mask.last(last) + 1)
    low, common_low, common_high, high = (tokens.row(key_rank, position) for position in ends)
    bounds = [low, common_low, common_high, high] if common_low < common_high else [low, high]
    for start, stop in pairwise(bounds):
        for row in range(start, stop, size):
            keys = slice(row, min(row + size, stop))
            yield keys, start == common_low < common_high == stop


def can_be_read(documents: Tensor) -> bool:
    """Return whether the host can read these numbers without waiting for a device."""
    return documents.device.type == "cpu"


def _is_one_document(documents: Tensor, key_documents: Tensor) -> bool:
    """Return whether in every sample all these tokens belong to one document."""
    first = documents[:, :1]
    return torch.equal(documents, first.expand_as(documents)) and torch.equal(key_documents, first.expand_as(documents))
