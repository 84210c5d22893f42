"""What a mode of tensor parallelism is: the axes it needs, and for each matmul a table of layouts.

A mode file in ``modes/`` subclasses `TensorMode`, registers itself by name and holds nothing but its table.
No torch here: sizes and layouts are checked before any process starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class TensorMode:
    """Base of all modes. ``axes`` are the atomic mesh axes, outermost first."""

    name: str = ""
    axes: tuple[str, ...] = ()
    #: whether the layers can run in this mode; False while only its axes are known
    has_layers: bool = False

    @classmethod
    def axis_sizes(cls, size: int, depth: int = 1, shape: Sequence[int] | None = None) -> dict[str, int]:
        """Size of each axis for ``tensor.size`` ranks.

        Raises:
            ValueError: when ``size`` does not factor as the mode needs; shows the arithmetic and near sizes.
        """
        if shape is not None:
            if len(shape) != len(cls.axes):
                raise ValueError(
                    f"parallel.tensor.shape = {tuple(shape)} has {len(shape)} numbers, but mode {cls.name} has "
                    f"{len(cls.axes)} axes ({', '.join(cls.axes)})"
                )
            if math.prod(shape) != size:
                product = " x ".join(map(str, shape))
                raise ValueError(
                    f"parallel.tensor.shape: {product} = {math.prod(shape)}, but parallel.tensor.size = {size}"
                )
            return dict(zip(cls.axes, shape, strict=True))
        return dict(zip(cls.axes, cls.default_shape(size, depth), strict=True))

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        raise NotImplementedError


def square_side(size: int, what: str) -> int:
    """The side q with q * q == size."""
    side = math.isqrt(size)
    if side * side != size:
        near = " or ".join(str(q * q) for q in (side, side + 1))
        raise ValueError(
            f"{what} = {size} is not a square (q x q); use {near}, or give parallel.tensor.shape for a rectangle"
        )
    return side
