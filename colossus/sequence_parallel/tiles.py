"""Which tiles of the attention scores are computed: pairs of a range of queries and a range of keys.

A block of scores is what the queries of one ring rank make with the keys of another; both ranks hold a head and a tail
chunk (see `order`). Under a causal mask there are three kinds of blocks, each of one kernel call and of the same work:
keys of the same rank (causal as they lie, for the head comes before the tail), keys of an earlier rank (all queries see
its head, none its tail), keys of a later one (the tail sees all, the head nothing).

Documents are cut finer, so that most pairs of two documents are skipped and no mask is larger than a tile. Which pairs
those are, the numbers of the documents say: they are read where that costs nothing. On an accelerator the host would
wait for them in every layer, so there all tiles that causality leaves are computed, each with its mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

#: tokens of a tile: large enough that a kernel call costs little beside its work
TILE = 512
#: where documents are not read nothing is skipped for being small: fewer calls, masks of at most 4 MB a sample
MASKED_TILE = 2048


#: a range of a rank's tokens: its rows, and where in the sequence it begins
_Range = tuple[slice, int]


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """One kernel call.

    Attributes:
        queries: rows of the local queries.
        keys: rows of the keys of the block.
        causal: whether query i of the tile sees the keys up to i only.
        mask: [batch, 1, queries, keys], True where a query may look, or None.
    """

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True)
class ScoreBlock:
    """The scores of the queries of one ring rank with the keys of one ring rank.

    Attributes:
        num_tokens: queries, and keys, of the block: the tokens of one rank.
        ring: number of ring ranks.
        query_rank, key_rank: their indices in the ring.
    """

    num_tokens: int
    ring: int
    query_rank: int
    key_rank: int
    causal: bool

    def tiles(self, documents: Tensor | None = None, key_documents: Tensor | None = None) -> Iterator[AttentionTile]:
        """What to compute. Every query sees itself, in a tile of the block of its own rank's keys.

        Args:
            documents: [batch, num_tokens], numbers of the queries' documents; a query sees keys of the same number
                only.
            key_documents: the same of the keys.
        """
        if documents is None or key_documents is None:
            yield from self._tiles_of_one_document()
            return
        if can_be_read(documents):
            yield from self._tiles_by_number(documents, key_documents)
            return
        for (queries, query_start), (keys, key_start) in product(*self._ranges(MASKED_TILE)):
            if not self.causal or key_start <= query_start:
                mask = _same_document(documents, queries, key_documents, keys)
                yield AttentionTile(queries, keys, self.causal and key_start == query_start, mask)

    def _tiles_by_number(self, documents: Tensor, key_documents: Tensor) -> Iterator[AttentionTile]:
        rows, columns = self._ranges(TILE)
        row_bounds, column_bounds = _bounds(documents, rows), _bounds(key_documents, columns)
        if all(_is_one_document([bounds, *column_bounds]) for bounds in row_bounds):
            yield from self._tiles_of_one_document()
            return
        for (queries, query_start), query_bounds in zip(rows, row_bounds, strict=True):
            for (keys, key_start), key_bounds in zip(columns, column_bounds, strict=True):
                if (self.causal and key_start > query_start) or _are_disjoint(query_bounds, key_bounds):
                    continue
                on_diagonal = self.causal and key_start == query_start
                if _is_one_document([query_bounds, key_bounds]):
                    yield AttentionTile(queries, keys, on_diagonal)
                    continue
                mask = _same_document(documents, queries, key_documents, keys)
                if mask.any():
                    yield AttentionTile(queries, keys, on_diagonal, mask)

    def _tiles_of_one_document(self) -> Iterator[AttentionTile]:
        everything = slice(0, self.num_tokens)
        head, tail = slice(0, self.num_tokens // 2), slice(self.num_tokens // 2, self.num_tokens)
        if not self.causal or self.query_rank == self.key_rank:
            yield AttentionTile(everything, everything, self.causal)
        elif self.key_rank < self.query_rank:
            yield AttentionTile(everything, head)
        else:
            yield AttentionTile(tail, everything)

    def _ranges(self, tile: int) -> tuple[list[_Range], list[_Range]]:
        """Of the queries and of the keys, cut into tiles of at most this many tokens."""
        return self._ranges_of(self.query_rank, tile), self._ranges_of(self.key_rank, tile)

    def _ranges_of(self, rank: int, tile: int) -> list[_Range]:
        chunk = self.num_tokens // 2 if self.ring > 1 else self.num_tokens
        chunks = (rank, 2 * self.ring - 1 - rank) if self.ring > 1 else (0,)
        return [
            (slice(half * chunk + start, half * chunk + min(start + tile, chunk)), number * chunk + start)
            for half, number in enumerate(chunks)
            for start in range(0, chunk, tile)
        ]


def can_be_read(documents: Tensor) -> bool:
    """Whether the host knows these numbers without waiting for a device."""
    return documents.device.type == "cpu"


def _same_document(documents: Tensor, queries: slice, key_documents: Tensor, keys: slice) -> Tensor:
    return documents[:, None, queries, None] == key_documents[:, None, None, keys]


#: smallest and largest document number in a range of tokens, one of each for every sample
_Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def _bounds(documents: Tensor, ranges: list[_Range]) -> list[_Bounds]:
    found = [torch.stack(documents[:, rows].aminmax(dim=1)) for rows, _ in ranges]
    return [(tuple(low), tuple(high)) for low, high in torch.stack(found).tolist()]


def _is_one_document(bounds: list[_Bounds]) -> bool:
    """Whether all tokens of these ranges belong to one document, in every sample."""
    return all(low == high == bounds[0][0] for low, high in bounds)


def _are_disjoint(query_bounds: _Bounds, key_bounds: _Bounds) -> bool:
    """Whether no document can be in both ranges, in any sample."""
    samples = zip(*query_bounds, *key_bounds, strict=True)
    return all(high < key_low or key_high < low for low, high, key_low, key_high in samples)
