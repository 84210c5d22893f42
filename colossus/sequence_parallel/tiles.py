"""Which tiles of the attention scores are computed: pairs of a range of queries and a range of keys.

A block of scores is what the queries of one ring rank make with the keys of another; both ranks hold a head and a tail
chunk (see `zigzag`). Under a causal mask there are three kinds of blocks, each of one kernel call and of the same work:
keys of the same rank (causal as they lie, for the head comes before the tail), keys of an earlier rank (all queries see
its head, none its tail), keys of a later one (the tail sees all, the head nothing).

Documents are cut finer, so that no mask is larger than a tile. Where the host can read the numbers of the documents at
no cost, tiles that they mask out are left out. On an accelerator the host would wait for them in every layer, so there
all tiles that causality leaves are computed.
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


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """One kernel call.

    Attributes:
        queries: rows of the local queries.
        keys: rows of the keys of the block.
        causal: whether query i of the tile sees the keys up to i only; then there is no mask.
        mask: [batch, 1, queries, keys], True where a query may look, or None.
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
) -> Iterator[AttentionTile]:
    """What to compute of one block. Every query sees itself, in a tile of the block of its own rank's keys.

    Args:
        num_tokens: queries, and keys, of the block: the tokens of one rank.
        ring: number of ring ranks.
        query_rank, key_rank: their indices in the ring.
        documents: [batch, num_tokens], numbers of the queries' documents; a query sees keys of the same number only.
        key_documents: the same of the keys.
    """
    if documents is None or key_documents is None:
        yield from _tiles_of_one_document(num_tokens, query_rank, key_rank, causal)
        return
    is_read = can_be_read(documents)
    if is_read and _is_one_document(documents, key_documents):
        yield from _tiles_of_one_document(num_tokens, query_rank, key_rank, causal)
        return
    size = TILE if is_read else MASKED_TILE
    pairs = product(_ranges(num_tokens, ring, query_rank, size), _ranges(num_tokens, ring, key_rank, size))
    for (queries, query_start), (keys, key_start) in pairs:
        if causal and key_start > query_start:
            continue
        mask = documents[:, None, queries, None] == key_documents[:, None, None, keys]
        on_diagonal = causal and key_start == query_start
        if is_read and not mask.any():
            continue
        if is_read and mask.all():
            yield AttentionTile(queries, keys, on_diagonal)
            continue
        yield AttentionTile(queries, keys, mask=mask.tril() if on_diagonal else mask)


def _tiles_of_one_document(num_tokens: int, query_rank: int, key_rank: int, causal: bool) -> Iterator[AttentionTile]:
    everything, half = slice(0, num_tokens), num_tokens // 2
    if not causal or query_rank == key_rank:
        yield AttentionTile(everything, everything, causal)
    elif key_rank < query_rank:
        yield AttentionTile(everything, slice(0, half))
    else:
        yield AttentionTile(slice(half, num_tokens), everything)


def _ranges(num_tokens: int, ring: int, rank: int, size: int) -> list[tuple[slice, int]]:
    """A rank's tokens, cut into ranges of at most ``size``: their rows, and where in the sequence they begin."""
    chunk, chunks = (num_tokens // 2, (rank, 2 * ring - 1 - rank)) if ring > 1 else (num_tokens, (0,))
    return [
        (slice(place * chunk + start, place * chunk + min(start + size, chunk)), number * chunk + start)
        for place, number in enumerate(chunks)
        for start in range(0, chunk, size)
    ]


def can_be_read(documents: Tensor) -> bool:
    """Whether the host knows these numbers without waiting for a device."""
    return documents.device.type == "cpu"


def _is_one_document(documents: Tensor, key_documents: Tensor) -> bool:
    """Whether in every sample all these tokens belong to one document."""
    first = documents[:, :1]
    return torch.equal(documents, first.expand_as(documents)) and torch.equal(key_documents, first.expand_as(documents))
