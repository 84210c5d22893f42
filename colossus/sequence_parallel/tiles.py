"""Which parts of a block of scores are computed: pairs of a range of queries and a range of keys.

The queries of one ring rank meet the keys of another; both hold a head and a tail chunk (see `order`). With causal
attention three cases are left, each of one kernel call and of the same work: the own keys (causal as they lie, for the
head comes before the tail), keys of an earlier rank (all queries see its head, none its tail), keys of a later one
(the tail sees all, the head nothing).

Documents are cut finer, in tiles, so that most pairs of two documents are skipped and no mask is larger than a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: tokens of a tile: large enough that a kernel call costs little beside its work
TILE = 512


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """One kernel call.

    Attributes:
        queries: rows of the local queries.
        keys: columns of the keys that are here now.
        causal: whether query i sees the keys up to i only.
        mask: [batch, 1, queries, keys], True where a query may look, or None.
    """

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True)
class Pair:
    """The queries of ring rank ``mine`` and the keys of ring rank ``theirs``, ``length`` tokens each, of ``ring``."""

    length: int
    ring: int
    mine: int
    theirs: int
    causal: bool

    def tiles(self, documents: Tensor | None = None, others: Tensor | None = None) -> Iterator[AttentionTile]:
        """What to compute; every query sees itself in a tile of its own rank's block.

        Args:
            documents: [batch, length], numbers of the queries' documents; a query sees keys of the same number only.
            others: the same of the keys.
        """
        if documents is None or others is None:
            yield from self._whole()
            return
        rows, columns = self._tiles(self.mine), self._tiles(self.theirs)
        row_ranges, column_ranges = _ranges(documents, rows), _ranges(others, columns)
        if all(_is_one_document([first, *column_ranges]) for first in row_ranges):
            yield from self._whole()
            return
        for (queries, start), here in zip(rows, row_ranges, strict=True):
            for (keys, key_start), there in zip(columns, column_ranges, strict=True):
                if (self.causal and key_start > start) or _are_apart(here, there):
                    continue
                diagonal = self.causal and key_start == start
                if _is_one_document([here, there]):
                    yield AttentionTile(queries, keys, diagonal)
                    continue
                mask = documents[:, None, queries, None] == others[:, None, None, keys]
                if mask.any():
                    yield AttentionTile(queries, keys, diagonal, mask)

    def _whole(self) -> Iterator[AttentionTile]:
        everything = slice(0, self.length)
        head, tail = slice(0, self.length // 2), slice(self.length // 2, self.length)
        if not self.causal or self.mine == self.theirs:
            yield AttentionTile(everything, everything, self.causal)
        elif self.theirs < self.mine:
            yield AttentionTile(everything, head)
        else:
            yield AttentionTile(tail, everything)

    def _tiles(self, index: int) -> list[tuple[slice, int]]:
        """Where each tile of a rank lies in its tokens, and where it begins in the sequence."""
        chunk = self.length // 2 if self.ring > 1 else self.length
        chunks = (index, 2 * self.ring - 1 - index) if self.ring > 1 else (0,)
        return [
            (slice(half * chunk + at, half * chunk + min(at + TILE, chunk)), number * chunk + at)
            for half, number in enumerate(chunks)
            for at in range(0, chunk, TILE)
        ]


#: smallest and largest document number in a tile, one of each for every sample
_Range = tuple[tuple[int, ...], tuple[int, ...]]


def _ranges(documents: Tensor, tiles: list[tuple[slice, int]]) -> list[_Range]:
    bounds = [torch.stack(documents[:, at].aminmax(dim=1)) for at, _ in tiles]
    return [(tuple(low), tuple(high)) for low, high in torch.stack(bounds).tolist()]


def _is_one_document(ranges: list[_Range]) -> bool:
    """Whether all tokens of these tiles belong to one document, in every sample."""
    return all(low == high == ranges[0][0] for low, high in ranges)


def _are_apart(here: _Range, there: _Range) -> bool:
    """Whether no document can be in both tiles, in any sample."""
    samples = zip(*here, *there, strict=True)
    return all(high < other_low or other_high < low for low, high, other_low, other_high in samples)
