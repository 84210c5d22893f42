"""The experts of a model with a router of its own, spread over ranks: those of transformers' models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.kept_results import products_without_values
from colossus.construct.initial_values import torch_linear
from colossus.context.groups import AxisGroup
from colossus.layers.grouped_matmul import group_sizes, grouped_product
from colossus.layers.layer import Layer
from colossus.layers.moe import expert_axes_of, mix
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, spec_of
from colossus.sharded_tensor.regions import unwrap


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class RoutedExperts(Layer):
    """The weighted sum of the experts of each token, down(gated(gate_up(x))), chosen by a router elsewhere.

    Experts are spread over `parallel.expert`; tensor ranks compute the same ones.

    Shape:
        forward takes x [tokens, hidden], choices [tokens, top_k] and weights [tokens, top_k], and returns [tokens,
        hidden]; a choice of ``num_experts`` adds nothing. Parameters, by full shapes: ``gate_up_proj`` [experts, 2 ffn,
        hidden], ``down_proj`` [experts, hidden, ffn].

    Attributes:
        gated: [rows, 2 ffn] -> [rows, ffn]; by default that of SwiGLU, the gate first.
    """

    gated: Callable[[Tensor], Tensor] = staticmethod(_swiglu)

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_size, self.num_experts = hidden_size, ffn_size, num_experts
        layout = Layout((expert_axes_of(self.context.grid, num_experts), (), ()))
        shape, out_shape = (num_experts, 2 * ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        self.gate_up_proj = self.make_parameter({"": shape}, layout, init or torch_linear(hidden_size), dtype=dtype)
        self.down_proj = self.make_parameter({"": out_shape}, layout, out_init or torch_linear(ffn_size), dtype=dtype)
        for parameter in (self.gate_up_proj, self.down_proj):
            spec_of(parameter).is_stack = True
            self.decide_gradients(parameter, self.parallel.regions.whole)

    @property
    def group(self) -> AxisGroup:
        return self.context.group(self.context.grid.expert_axes)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, _ = unwrap(hidden_states, self.parallel)
        return mix(x, top_k_weights, top_k_index, self.num_experts, self.group, self._experts, drops=True)

    def _experts(self, x: Tensor, counts: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            sizes = group_sizes(counts, x, self.gate_up_proj)
            inner = self.gated(grouped_product(x, self.gate_up_proj, sizes))
            # an exchange of rows reads this product, and nothing else does
            with products_without_values(self.group.size > 1):
                return grouped_product(inner, self.down_proj, sizes)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size}, {self.ffn_size}), {spec_of(self.down_proj).layout}"
