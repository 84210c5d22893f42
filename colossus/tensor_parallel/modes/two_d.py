"""2D (SUMMA, van de Geijn and Watts 1997; Optimus, 2104.05343): activations and weights on a row x col grid.

An activation is split by batch over ``row`` and by features over ``col``. Two shardings compute the same product: one
gathers x over ``col``, the other does not move x and reduces y over ``col``. Both gather the weight over ``row``.
"""

from __future__ import annotations

from dataclasses import replace

from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.registry import TENSOR_MODES
from colossus.tensor_parallel.mode import MatmulSharding, Regions, TensorMode, is_square, square_side

ROW, COL = ("row",), ("col",)


@TENSOR_MODES.register("2d")
class TwoD(TensorMode):
    name = "2d"
    axes: tuple[str, ...] = ROW + COL
    batch_axes: tuple[str, ...] = ROW

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        side = square_side(size, f"{cls.name}: parallel.tensor.size")
        return side, side

    @classmethod
    def regions(cls, inputs: Activation, *, sequence_sharded: bool) -> Regions:
        whole = replace(inputs, batch=inputs.batch + cls.batch_axes)
        split = replace(whole, features=COL)
        return Regions(whole=whole, residual=split, inner=split)

    @classmethod
    def shardings(cls, split: str, regions: Regions) -> tuple[MatmulSharding, ...]:
        move_x = MatmulSharding(
            x=replace(regions.whole, grad_partial=COL),
            weight=Layout((COL, ROW)),
            gathered_weight=Layout((COL, ()), grad_partial=ROW),
            y=regions.inner,
        )
        reduce_y = MatmulSharding(
            x=regions.residual,
            weight=Layout((ROW, COL)),
            gathered_weight=Layout(((), COL), grad_partial=ROW),
            y=replace(regions.whole, partial=COL),
        )
        return move_x, reduce_y


@TENSOR_MODES.register("2.5d")
class TwoAndAHalfD(TwoD):
    """2.5D (Solomonik and Demmel 2011; Tesseract, 2105.14500): ``depth`` copies of a 2D grid share the batch.

    Weights are replicated over ``depth``, activations are split by batch over depth x row, and gradients are summed
    over ``depth`` with the other gradients: depth d is data d x 2D, within one model.
    """

    name = "2.5d"
    axes = ("depth", "row", "col")
    batch_axes = ("depth", "row")

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        if not depth:  # the fewest copies that leave a square
            depth = next(d for d in range(1, size + 1) if size % d == 0 and is_square(size // d))
        if size % depth:
            raise ValueError(
                f"2.5d: parallel.tensor.size = {size} is not a multiple of parallel.tensor.depth = {depth}"
            )
        side = square_side(size // depth, f"2.5d: parallel.tensor.size / depth = {size} / {depth}")
        return depth, side, side
