"""Packing: which spans of documents make up each row. Arrays only: no torch, no tokens.

Best fit is the one of Ding et al., "Fewer Truncations Improve Language Modeling" (2404.10830): documents longer than a
row are cut into whole rows and a rest, and then the longest piece goes first, each into the row with the least room
that it fits in. Pieces of equal length are placed together, so a million take a second or less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STRATEGIES = ("best_fit", "greedy", "none")


class Spans(NamedTuple):
    """The spans of documents in all rows, row after row.

    Attributes:
        starts: [s] position of the first token in the tokens of all documents.
        lengths: [s] number of tokens.
        closed: [s] whether the span ends where its document does.
        rows: [r + 1] number of the first span of each row.
    """

    starts: np.ndarray
    lengths: np.ndarray
    closed: np.ndarray
    rows: np.ndarray


def pack(starts: np.ndarray, lengths: np.ndarray, size: int, strategy: str) -> Spans:
    """Return the rows of documents. Every token is in exactly one span.

    Args:
        starts, lengths: [n] of the documents, in the order in which they are placed.
        size: tokens of a row.
        strategy: ``"best_fit"``; ``"greedy"``: one after the other, cut where a row ends, so that only the last row has
            padding; ``"none"``: a row for each document, and for each further part of a long one.
    """
    if strategy == "greedy":
        return _greedy(starts, lengths, size)
    starts, lengths, closed = _cut(starts, lengths, size)
    if strategy == "none":
        return Spans(starts, lengths, closed, np.arange(len(starts) + 1))
    row_of = best_fit(lengths, size)
    order = np.argsort(row_of, kind="stable")
    rows = np.searchsorted(row_of[order], np.arange(int(row_of.max(initial=-1)) + 2))
    return Spans(starts[order], lengths[order], closed[order], rows)


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the row of each piece, [n], by best fit of the pieces in the order of falling lengths.

    Args:
        lengths: [n], each from 1 to ``size``.
        size: tokens of a row.
    """
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    bounds = np.flatnonzero(np.diff(lengths[order], prepend=-1, append=-1))
    #: room -> rows that have it, and the rooms that occur as bits of one number
    with_room: dict[int, list[np.ndarray]] = {}
    rooms, num_rows = 0, 0
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        pieces, length = order[begin:end], int(lengths[order[begin]])
        while len(pieces):
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                own = with_room[room].pop()
                if not with_room[room]:
                    rooms &= ~(1 << room)
            else:
                room = size
                own = num_rows + np.arange(-(-len(pieces) // (size // length)))
                num_rows += len(own)
            per_row = room // length  # a row that the first of them fits best fits the next best, too
            used = -(-len(pieces) // per_row)
            here, unused = own[:used], own[used:]
            count = min(len(pieces), used * per_row, len(here) * per_row)
            row_of[pieces[:count]] = np.repeat(here, per_row)[:count]
            pieces = pieces[count:]
            last = count - (len(here) - 1) * per_row
            rests = (unused, room), (here[:-1], room - per_row * length), (here[-1:], room - last * length)
            for rows, rest in rests:
                if len(rows) and rest:
                    with_room.setdefault(rest, []).append(rows)
                    rooms |= 1 << rest
    return row_of


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers of ranges of ``counts`` [n] from ``starts`` [n] on, one range after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _cut(starts: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts and lengths of parts of at most ``size``, and whether each is the last of its document."""
    counts = -(-lengths // size)
    document = np.repeat(np.arange(len(lengths)), counts)
    part = ranges(np.zeros_like(counts), counts)
    part_lengths = np.minimum(size, lengths[document] - part * size)
    return starts[document] + part * size, part_lengths, part + 1 == counts[document]


def _greedy(starts: np.ndarray, lengths: np.ndarray, size: int) -> Spans:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    begins = np.sort(np.concatenate((ends - lengths, np.arange(0, total, size))))
    begins = begins[np.flatnonzero(np.diff(begins, prepend=-1))]
    document = np.searchsorted(ends, begins, side="right")
    span_lengths = np.diff(begins, append=total)
    closed = begins + span_lengths == ends[document]
    rows = np.searchsorted(begins, np.arange(0, total + size, size)[: -(-total // size) + 1])
    return Spans(starts[document] + begins - (ends - lengths)[document], span_lengths, closed, rows)
