"""How the rows of some parameters lie on the ranks that store them: those of one rank in one flat tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from colossus.layout.parameter import spec_of


@dataclass(frozen=True)
class Piece:
    """One logical shard of a parameter, in elements.

    Attributes:
        start, count: of it in the whole parameter.
        offset, width: of what a rank stores of it, in the rank's flat rows.
    """

    param: nn.Parameter
    start: int
    count: int
    offset: int
    width: int

    def on(self, rank: int) -> tuple[int, int]:
        """What a rank stores of it: (first element, how many); the last ranks may have less, or nothing."""
        first = min(rank * self.width, self.count)
        return first, min(self.width, self.count - first)


class RowLayout:
    """The rows of each logical shard, cut over ``ranks``: as many on each, but for the last that have any.

    Attributes:
        pieces: in the order of a rank's flat rows.
        size: of these, in elements, with the padding behind the last rows.
        splits: for each rank the sizes of its rows and of the padding behind them, in turn, for each piece.
    """

    def __init__(self, params: Sequence[nn.Parameter], ranks: int) -> None:
        self.pieces: list[Piece] = []
        self.size = 0
        for param in params:
            row = math.prod(param.shape[1:])
            for shard in spec_of(param).shards:
                start, stop = shard.rows
                width = -(-(stop - start) // ranks) * row
                self.pieces.append(Piece(param, start * row, (stop - start) * row, self.size, width))
                self.size += width
        self.splits = [
            [size for piece in self.pieces for size in (piece.on(rank)[1], piece.width - piece.on(rank)[1])]
            for rank in range(ranks)
        ]

    def pieces_of(self, param: nn.Parameter) -> list[Piece]:
        return [piece for piece in self.pieces if piece.param is param]

    def rows_in(self, whole: Tensor, piece: Piece, rank: int) -> Tensor:
        """A rank's rows of a piece in the whole parameter, or its gradient, flat: a view."""
        first, count = piece.on(rank)
        return whole[piece.start + first :][:count]
