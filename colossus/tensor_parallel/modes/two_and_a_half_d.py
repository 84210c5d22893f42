"""2.5D (Solomonik and Demmel 2011; Tesseract, 2105.14500): ``depth`` copies of a 2D grid share the batch.

Weights are replicated over ``depth``, activations are split by batch over depth x row, and gradients are summed over
``depth`` with the other gradients: depth d is data d x 2D, within one model.
"""

from __future__ import annotations

from colossus.registry import TENSOR_MODES
from colossus.tensor_parallel.mode import is_square, square_side
from colossus.tensor_parallel.modes.two_d import TwoD


@TENSOR_MODES.register("2.5d")
class TwoAndAHalfD(TwoD):
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
