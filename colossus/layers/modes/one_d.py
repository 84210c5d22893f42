"""1D (Megatron-LM, 1909.08053): weights split over one axis, by output (column) or by input (row).

With ``sequence_sharded`` (2205.05198) the activations between blocks are split by tokens over the same axis.
"""

from collections.abc import Sequence
from dataclasses import replace

from colossus.layers.tensor_mode import MatmulTable, Regions, TensorMode
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.registry import TENSOR_MODES

AXIS = ("tensor",)
WHOLE = Layout(((), ()))
BY_OUT = Layout((AXIS, ()))
BY_IN = Layout(((), AXIS))


@TENSOR_MODES.register("1d")
class OneD(TensorMode):
    name = "1d"
    axes = AXIS
    has_layers = True

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        return (size,)

    @classmethod
    def regions(cls, door: Activation, *, sequence_sharded: bool) -> Regions:
        outer = replace(door, tokens=door.tokens + AXIS) if sequence_sharded else door
        return Regions(user=door, outer=outer, inner=replace(door, features=AXIS))

    @classmethod
    def linear(cls, split: str, regions: Regions) -> MatmulTable:
        if split == "column":
            whole = replace(regions.user, grad_partial=AXIS)
            return MatmulTable(x=whole, weight=BY_OUT, weight_used=BY_OUT, y=regions.inner)
        if split == "row":
            partial = replace(regions.user, partial=AXIS)
            return MatmulTable(x=regions.inner, weight=BY_IN, weight_used=BY_IN, y=partial)
        return MatmulTable(x=regions.user, weight=WHOLE, weight_used=WHOLE, y=regions.user)

    @classmethod
    def lone_split(cls, in_features: int, out_features: Sequence[int], size: int) -> str:
        # column sums dx (2 in) and gathers y (out); row gathers dx (in) and sums y (2 out), per token
        by_out = all(out % size == 0 for out in out_features)
        by_in = in_features % size == 0
        if by_out and (in_features <= sum(out_features) or not by_in):
            return "column"
        return "row" if by_in else "none"
