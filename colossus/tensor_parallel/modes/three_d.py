"""3D (Agarwal et al. 1995; Colossal-AI's 3D, 2105.14450): each product on an i x j x k cube.

A column linear gathers x over ``j``, the weight over ``i``, and scatters y over ``k``; a row linear does the same with
``j`` and ``k`` exchanged, so that column then row returns to the layout of x.
"""

from __future__ import annotations

from dataclasses import replace

from colossus.arithmetic import either, nearest_powers
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.registry import TENSOR_MODES
from colossus.tensor_parallel.mode import MatmulSharding, Regions, TensorMode


@TENSOR_MODES.register("3d")
class ThreeD(TensorMode):
    name = "3d"
    axes = ("i", "j", "k")

    @classmethod
    def default_shape(cls, size: int, depth: int) -> tuple[int, ...]:
        side = round(size ** (1 / 3))
        if side**3 != size:
            raise ValueError(
                f"3d: parallel.tensor.size = {size} is not a cube (q x q x q); use "
                f"{either(nearest_powers(size, 3))}, or set parallel.tensor.shape for a box"
            )
        return side, side, side

    @classmethod
    def regions(cls, inputs: Activation, *, sequence_sharded: bool) -> Regions:
        whole = replace(inputs, batch=(*inputs.batch, "i", "j"))
        inner = replace(inputs, batch=(*inputs.batch, "i", "k"), features=("j",))
        return Regions(whole=whole, residual=replace(whole, features=("k",)), inner=inner)

    @classmethod
    def shardings(cls, split: str, regions: Regions) -> tuple[MatmulSharding, ...]:
        gathered, contracted = ("j", "k") if split == "column" else ("k", "j")
        rows = replace(regions.whole, batch=regions.whole.batch[:-1])
        sharding = MatmulSharding(
            x=replace(rows, features=(contracted,), grad_partial=(gathered,)),
            weight=Layout(((gathered, "i"), (contracted,))),
            gathered_weight=Layout(((gathered,), (contracted,)), grad_partial=("i",)),
            y=replace(rows, features=(gathered,), partial=(contracted,)),
        )
        return (sharding,)
