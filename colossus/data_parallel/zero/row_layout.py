"""The rows of parameters over ranks, and their places in a rank's flat rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from colossus.data_parallel.zero.row_forms import rows_per_rank
from colossus.layout.parameter import spec_of


@dataclass(frozen=True)
class Piece:
    """One logical shard of a parameter; all numbers are in elements.

    Attributes:
        param: the parameter.
        index: its number among the parameters of the layout.
        start: the shard's first element in the whole parameter.
        count: its number of elements.
        offset: the place of a rank's part of it in the rank's flat rows.
        width: the size of that part, with its padding.
    """

    param: nn.Parameter
    index: int
    start: int
    count: int
    offset: int
    width: int

    def on(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's part, and its size; the last ranks may have fewer elements, or none."""
        first = min(rank * self.width, self.count)
        return first, min(self.width, self.count - first)

    def over(self, first: int, ranks: int) -> tuple[int, int]:
        """Return how many of consecutive ranks have parts without padding, and the elements of the next one's part."""
        count = min(max(self.count - first * self.width, 0), ranks * self.width)
        return divmod(count, self.width) if count else (0, 0)


class RowLayout:
    """The rows of each logical shard, cut over ``ranks``: equally many on each rank, fewer on the last.

    Ranks with equally many rows are copied at once: the number of copies does not depend on the number of ranks.

    Attributes:
        pieces: the shards, in the order of a rank's flat rows.
        size: the elements of a rank's flat rows, with padding.
    """

    def __init__(self, params: Sequence[nn.Parameter], ranks: int) -> None:
        self.pieces: list[Piece] = []
        self.size = 0
        for index, param in enumerate(params):
            row = math.prod(param.shape[1:])
            for shard in spec_of(param).shards:
                start, stop = shard.rows
                width = rows_per_rank(stop - start, ranks) * row
                self.pieces.append(Piece(param, index, start * row, (stop - start) * row, self.size, width))
                self.size += width
        self._widths = [piece.width for piece in self.pieces]
        #: `Piece.over` of each piece, by the first of consecutive ranks and their number
        self._spans: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def pieces_of(self, param: nn.Parameter) -> list[Piece]:
        return [piece for piece in self.pieces if piece.param is param]

    def rows_in(self, whole: Tensor, piece: Piece, rank: int) -> Tensor:
        """Return a flat view of a rank's rows of a piece in the whole parameter or its gradient."""
        first, count = piece.on(rank)
        return whole[piece.start + first :][:count]

    def wholes(self, values: Sequence[Tensor | None], first: int, ranks: int) -> list[Tensor]:
        """Return views of whole parameters or their gradients, in the order of `parts`.

        Args:
            values: the flat value of each parameter; None: its pieces are left out.
            first: the first of consecutive ranks.
            ranks: their number.
        """
        views: list[Tensor] = []
        for piece, (full, rest) in zip(self.pieces, self._over(first, ranks), strict=True):
            value = values[piece.index]
            if value is not None:
                begin, middle = piece.start + first * piece.width, piece.start + (first + full) * piece.width
                views += [value[begin:middle].view(full, -1)] if full else []
                views += [value[middle : middle + rest]] if rest else []
        return views

    def parts(self, rows: Tensor, values: Sequence[object], first: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the flat rows of consecutive ranks, [ranks, size]: those that have values, and the others.

        Args:
            rows: the flat rows.
            values: the value of each parameter; None: it has none.
            first: the first of the ranks.
        """
        views: list[Tensor] = []
        empty: list[Tensor] = []
        ranks = rows.shape[0]
        for piece, own, span in zip(self.pieces, rows.split(self._widths, 1), self._over(first, ranks), strict=True):
            full, rest = span if values[piece.index] is not None else (0, 0)
            if full == ranks:
                views.append(own)
                continue
            views += [own[:full]] if full else []
            if rest:
                views.append(own[full, :rest])
                empty.append(own[full, rest:])
            empty.append(own[full + (rest > 0) :])
        return views, [view for view in empty if view.numel()]

    def _over(self, first: int, ranks: int) -> list[tuple[int, int]]:
        spans = self._spans.get((first, ranks))
        if spans is None:
            spans = self._spans[first, ranks] = [piece.over(first, ranks) for piece in self.pieces]
        return spans
