"""Which of the ranks that hold the same box of a tensor writes it. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from colossus.layout.layout import Layout


class WriterShares:
    """Gives each box to one of the ranks that hold it: to the one which has been given the fewest bytes.

    Ranks that hold the same tensors ask for them in the same order, so that all come to the same answer and nothing is
    exchanged. Ranks of other pipeline stages hold others.

    Args:
        sizes: of all axes.
        at: this rank's coordinates.
        apart: axes along which ranks do not hold the same tensors.
    """

    def __init__(self, sizes: Mapping[str, int], at: Mapping[str, int], apart: Sequence[str] = ("pipeline",)) -> None:
        self._sizes, self._at, self._apart = sizes, at, apart
        #: bytes given to each of the ranks with the same boxes, for the axes along which these lie
        self._given: dict[tuple[tuple[str, int], ...], list[int]] = {}

    def takes(self, layout: Layout, shape: Sequence[int], item_bytes: int) -> bool:
        """Whether this rank writes its box of a tensor of this full shape."""
        index, along = 0, []
        for axis, size in self._sizes.items():
            if size > 1 and axis not in self._apart and axis not in layout.shard_axes:
                index = index * size + self._at[axis]
                along.append((axis, size))
        given = self._given.setdefault(tuple(along), [0] * math.prod(count for _, count in along))
        chosen = given.index(min(given))
        given[chosen] += math.prod(layout.chunk(shape, self._sizes)) * item_bytes
        return chosen == index
