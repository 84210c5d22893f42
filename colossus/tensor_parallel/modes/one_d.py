"""1D (Megatron-LM, 1909.08053): weights split over one axis, by output features (column) or by input features (row).

With ``sequence_sharded`` (2205.05198) the activations between blocks are split by tokens over the same axis.
"""

from __future__ import annotations

from dataclasses import replace

from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.registry import TENSOR_MODES
from colossus.tensor_parallel.mode import MatmulSharding, Regions, TensorMode

AXIS = ("tensor",)
BY_OUT = Layout((AXIS, ()))
BY_IN = Layout(((), AXIS))


@TENSOR_MODES.register("1d")
class OneD(TensorMode):
    name = "1d"
    axes = AXIS
    splits_tokens = True

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        return (size,)

    @classmethod
    def regions(cls, inputs: Activation, *, sequence_sharded: bool) -> Regions:
        residual = replace(inputs, tokens=inputs.tokens + AXIS) if sequence_sharded else inputs
        return Regions(whole=inputs, residual=residual, inner=replace(inputs, features=AXIS))

    @classmethod
    def shardings(cls, split: str, regions: Regions) -> tuple[MatmulSharding, ...]:
        if split == "column":
            x = replace(regions.whole, grad_partial=AXIS)
            return (MatmulSharding(x=x, weight=BY_OUT, gathered_weight=BY_OUT, y=regions.inner),)
        y = replace(regions.whole, partial=AXIS)
        return (MatmulSharding(x=regions.inner, weight=BY_IN, gathered_weight=BY_IN, y=y),)
