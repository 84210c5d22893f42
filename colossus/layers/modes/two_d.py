"""2D (SUMMA): activations and weights on a row x col grid."""

from colossus.layers.tensor_mode import TensorMode, square_side
from colossus.registry import TENSOR_MODES


@TENSOR_MODES.register("2d")
class TwoD(TensorMode):
    name = "2d"
    axes = ("row", "col")

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        side = square_side(size, "2d: parallel.tensor.size")
        return side, side
