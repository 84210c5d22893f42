"""1D (Megatron): weights split over one axis, by output (column) or by input (row)."""

from colossus.layers.tensor_mode import TensorMode
from colossus.registry import TENSOR_MODES


@TENSOR_MODES.register("1d")
class OneD(TensorMode):
    name = "1d"
    axes = ("tensor",)
    has_layers = True

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        return (size,)
