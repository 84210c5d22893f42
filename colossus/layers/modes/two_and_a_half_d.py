"""2.5D: ``depth`` copies of a 2D grid, the batch split over them."""

from colossus.layers.tensor_mode import TensorMode, square_side
from colossus.registry import TENSOR_MODES


@TENSOR_MODES.register("2.5d")
class TwoAndAHalfD(TensorMode):
    name = "2.5d"
    axes = ("depth", "row", "col")

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        if size % depth:
            raise ValueError(
                f"2.5d: parallel.tensor.size = {size} is not a multiple of parallel.tensor.depth = {depth}"
            )
        side = square_side(size // depth, f"2.5d: parallel.tensor.size / depth = {size} / {depth}")
        return depth, side, side
