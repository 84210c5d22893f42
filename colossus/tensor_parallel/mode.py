"""A mode of tensor parallelism: the axes that it needs, and the shardings of its matmuls.

A mode file in ``modes/`` subclasses `TensorMode`, registers itself by name and contains nothing but its shardings. It
imports no torch: sizes and layouts are checked before any process starts.
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
    """The layouts of activations in a model, by place.

    Attributes:
        whole: the layout that a user's ``forward`` sees: all features on every rank, gradient complete.
        residual: the layout between blocks.
        inner: the layout between a column and a row linear, and inside attention.
    """

    whole: Activation
    residual: Activation
    inner: Activation


@dataclass(frozen=True)
class MatmulSharding:
    """One way to compute ``y = reduce_c(gather_a(x) @ gather_b(w).T)``; ``w`` is [out, in] as in torch.

    The layouts of the caller's x and y belong to the call, not to the sharding; the moves (gather_a, reduce_c and so
    on) follow from both.

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
        """Return the same sharding without axes of one rank."""
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
    #: the mode can split activations by tokens (the option ``sequence_sharded``)
    splits_tokens: bool = False

    @classmethod
    def axis_sizes(cls, size: int, depth: int | None = None, shape: Sequence[int] | None = None) -> dict[str, int]:
        """Return the size of each axis for ``tensor.size`` ranks; ``depth`` None is the mode's own choice.

        Raises:
            ValueError: ``size`` does not factor as the mode needs; the message shows the arithmetic and near sizes.
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
        """Return the ranks along each axis; ``depth`` 0 leaves it to the mode."""
        raise NotImplementedError

    @classmethod
    def regions(cls, inputs: Activation, *, sequence_sharded: bool) -> Regions:
        """Return the layouts of the regions.

        Args:
            inputs: the layout of the model's inputs, which the engine splits over data and sequence axes.
        """
        raise NotImplementedError

    @classmethod
    def batch_ways(cls, sizes: AxisSizes) -> int:
        """Return the number that must divide the samples of a microbatch, so that every region splits them evenly."""
        regions = cls.regions(Activation(), sequence_sharded=False)
        ways = [math.prod(sizes[axis] for axis in x.batch) for x in (regions.whole, regions.residual, regions.inner)]
        return math.lcm(*ways)

    @classmethod
    def shardings(cls, split: str, regions: Regions) -> tuple[MatmulSharding, ...]:
        """Return the ways to compute a ``column`` linear (residual to inner) or a ``row`` linear (inner to residual).

        `choose_sharding.py` takes the one that moves fewest bytes. A linear outside a pair may take one of either kind.
        An embedding is the dgrad of a column linear: its ids are one-hot rows over the vocabulary.
        """
        raise NotImplementedError


def is_square(size: int) -> bool:
    return math.isqrt(size) ** 2 == size


def square_side(size: int, name: str) -> int:
    """Return the side q with q * q == size; ``name`` is the option in the error."""
    side = math.isqrt(size)
    if side * side != size:
        near = either(nearest_powers(size, 2))
        raise ValueError(
            f"{name} = {size} is not a square (q x q); use {near}, or set parallel.tensor.shape for a rectangle"
        )
    return side
