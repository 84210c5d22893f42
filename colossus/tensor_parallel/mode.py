"""What a mode of tensor parallelism is: the axes it needs, and the shardings of its matmuls.

A mode file in ``modes/`` subclasses `TensorMode`, registers itself by name and holds nothing but its shardings.
No torch here: sizes and layouts are checked before any process starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossus.arithmetic import either, nearest_powers
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout

#: mesh axis -> number of ranks along it
AxisSizes = Mapping[str, int]


@dataclass(frozen=True)
class Regions:
    """The layouts that activations have in a model, by where they are.

    Attributes:
        whole: what a user's ``forward`` sees: all features on every rank, gradient complete.
        residual: between blocks.
        inner: between a column and a row linear, and inside attention.
    """

    whole: Activation
    residual: Activation
    inner: Activation


@dataclass(frozen=True)
class MatmulSharding:
    """One way to compute ``y = reduce_c(gather_a(x) @ gather_b(w).T)``; ``w`` is [out, in] as in torch.

    The layouts in which x comes and y is wanted belong to the call, not to the sharding; the moves (gather_a, reduce_c
    and so on) follow from both.

    Attributes:
        x: layout of x in the multiplication.
        weight: stored layout of the weight.
        gathered_weight: layout of the weight in the multiplication.
        y: layout of the product before it is reduced, possibly a partial sum.
    """

    x: Activation
    weight: Layout
    gathered_weight: Layout
    y: Activation

    def drop_trivial_axes(self, sizes: AxisSizes) -> MatmulSharding:
        """The same without axes of one rank."""
        return MatmulSharding(
            x=self.x.drop_trivial_axes(sizes),
            weight=self.weight.drop_trivial_axes(sizes),
            gathered_weight=self.gathered_weight.drop_trivial_axes(sizes),
            y=self.y.drop_trivial_axes(sizes),
        )


class TensorMode:
    """Base of all modes. ``axes`` are the atomic mesh axes, outermost first."""

    name: str = ""
    axes: tuple[str, ...] = ()
    #: whether this mode can split activations by tokens (the option ``sequence_sharded``)
    splits_tokens: bool = False

    @classmethod
    def axis_sizes(cls, size: int, depth: int | None = None, shape: Sequence[int] | None = None) -> dict[str, int]:
        """Size of each axis for ``tensor.size`` ranks; ``depth`` None is the mode's own choice.

        Raises:
            ValueError: when ``size`` does not factor as the mode needs; shows the arithmetic and near sizes.
        """
        if shape is not None:
            sizes = dict(zip(cls.axes, shape, strict=False))
            is_deep = depth in (None, sizes.get("depth", depth))
            if len(shape) != len(cls.axes) or math.prod(shape) != size or not is_deep:
                of_depth = "" if depth is None else f", with parallel.tensor.depth = {depth}"
                raise ValueError(
                    f"parallel.tensor.shape = {tuple(shape)}: mode {cls.name} has {len(cls.axes)} axes "
                    f"({', '.join(cls.axes)}), whose product must be parallel.tensor.size = {size}{of_depth}"
                )
            return sizes
        return dict(zip(cls.axes, cls.default_shape(size, depth or 0), strict=True))

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        """Ranks along each axis; ``depth`` 0 is not given."""
        raise NotImplementedError

    @classmethod
    def regions(cls, inputs: Activation, *, sequence_sharded: bool) -> Regions:
        """Layouts of the regions, given how the engine splits the model's inputs (over data and sequence axes)."""
        raise NotImplementedError

    @classmethod
    def batch_ways(cls, sizes: AxisSizes) -> int:
        """What the samples of a microbatch must be a multiple of, for every region to split them evenly."""
        regions = cls.regions(Activation(), sequence_sharded=False)
        ways = [math.prod(sizes[axis] for axis in x.batch) for x in (regions.whole, regions.residual, regions.inner)]
        return math.lcm(*ways)

    @classmethod
    def shardings(cls, split: str, regions: Regions) -> tuple[MatmulSharding, ...]:
        """The ways to compute a ``column`` linear (residual to inner) or a ``row`` linear (inner to residual).

        Of several the one that moves fewest bytes is taken (`choose_sharding.py`). A linear outside of a pair may take
        any of both kinds. An embedding is the dgrad of a column linear: its ids are one-hot rows over the vocabulary.
        """
        raise NotImplementedError


def is_square(size: int) -> bool:
    return math.isqrt(size) ** 2 == size


def square_side(size: int, name: str) -> int:
    """The side q with q * q == size; ``name`` is the option in the error."""
    side = math.isqrt(size)
    if side * side != size:
        near = either(nearest_powers(size, 2))
        raise ValueError(
            f"{name} = {size} is not a square (q x q); use {near}, or give parallel.tensor.shape for a rectangle"
        )
    return side
