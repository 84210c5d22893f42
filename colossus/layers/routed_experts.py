"""The experts of a model with a router of its own, spread over ranks: those of transformers' models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm.kept_results import products_without_values
from colossus.construct.initial_values import Constant, torch_linear
from colossus.context.groups import AxisGroup
from colossus.layers.grouped_matmul import group_sizes, grouped_product
from colossus.layers.layer import Layer
from colossus.layers.moe import expert_axes_of, mix
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, spec_of
from colossus.sharded_tensor.regions import unwrap
from colossus.sharded_tensor.tensor import wrap


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class RoutedExperts(Layer):
    """The weighted sum of the experts of each token, down(gated(gate_up(x))), chosen by a router elsewhere.

    Experts are spread over `parallel.expert`; tensor ranks compute the same ones.

    Shape:
        forward takes x [tokens, hidden], choices [tokens, top_k] and weights [tokens, top_k], and returns [tokens,
        hidden]; a choice of ``num_experts`` adds nothing. Parameters, by full shapes: ``gate_up_proj`` [experts, 2 ffn,
        hidden], ``down_proj`` [experts, hidden, ffn], with ``transposed`` the last two dims the other way round
        (gpt-oss); with ``bias`` ``gate_up_proj_bias`` [experts, 2 ffn], ``down_proj_bias`` [experts, hidden].

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
        bias: bool = False,
        transposed: bool = False,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        out_bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_size, self.num_experts = hidden_size, ffn_size, num_experts
        self.transposed = transposed
        shape, out_shape = (2 * ffn_size, hidden_size), (hidden_size, ffn_size)
        step = -1 if transposed else 1
        self.gate_up_proj = self._stack(shape[::step], init or torch_linear(hidden_size), dtype)
        self.down_proj = self._stack(out_shape[::step], out_init or torch_linear(ffn_size), dtype)
        self.gate_up_proj_bias = self._stack(shape[:1], bias_init or Constant(0.0), dtype) if bias else None
        self.down_proj_bias = self._stack(out_shape[:1], out_bias_init or Constant(0.0), dtype) if bias else None

    def _stack(self, shape: tuple[int, ...], init: Initializer, dtype: torch.dtype | None) -> nn.Parameter:
        """Return a parameter with a tensor of this shape for each expert."""
        layout = Layout((expert_axes_of(self.context.grid, self.num_experts), *((),) * len(shape)))
        parameter = self.make_parameter({"": (self.num_experts, *shape)}, layout, init, dtype=dtype)
        spec_of(parameter).is_stack = True
        self.decide_gradients(parameter, self.parallel.regions.whole)
        return parameter

    @property
    def group(self) -> AxisGroup:
        return self.context.group(self.context.grid.expert_axes)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, placement = unwrap(hidden_states, self.parallel)
        choices, weights = (unwrap(tensor, self.parallel)[0] for tensor in (top_k_index, top_k_weights))
        y = mix(x, weights, choices, self.num_experts, self.group, self._experts, drops=True)
        return wrap(y, placement)

    def _experts(self, x: Tensor, counts: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            weights = self.gate_up_proj, self.down_proj
            up, down = (weight.mT if self.transposed else weight for weight in weights)
            sizes = group_sizes(counts, x, up)
            inner = self.gated(grouped_product(x, up, sizes, self.gate_up_proj_bias))
            # an exchange of rows reads this product, and nothing else does
            with products_without_values(self.group.size > 1):
                return grouped_product(inner, down, sizes, self.down_proj_bias)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size}, {self.ffn_size}), {spec_of(self.down_proj).layout}"
