"""3D: each matmul on an i x j x k cube."""

from colossus.layers.tensor_mode import TensorMode
from colossus.registry import TENSOR_MODES


@TENSOR_MODES.register("3d")
class ThreeD(TensorMode):
    name = "3d"
    axes = ("i", "j", "k")

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        side = round(size ** (1 / 3))
        if side**3 != size:
            low = side if side**3 < size else side - 1
            raise ValueError(
                f"3d: parallel.tensor.size = {size} is not a cube (q x q x q); use {max(low, 1) ** 3} or "
                f"{(low + 1) ** 3}, or give parallel.tensor.shape for a box"
            )
        return side, side, side
