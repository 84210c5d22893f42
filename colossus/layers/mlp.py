"""The two-layer perceptrons of a transformer: a column linear, an element-by-element function, a row linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.layers.block_defaults import default_ffn_size
from colossus.layers.children import call
from colossus.layers.layer import Layer
from colossus.layers.linear import Linear
from colossus.layout.parameter import Initializer


class _ColumnRowPair(Layer):
    """A column linear ``up`` and a row linear ``down``, between which features stay split."""

    num_outputs: int | None = None  # of ``up``, where it is fused

    up: Linear
    down: Linear

    def forward(self, x: Tensor) -> Tensor:
        up = call(self.up, x, self.parallel, self.parallel.regions.inner, outputs=self.num_outputs)
        y: Tensor = call(self.down, self._activation(up), self.parallel)
        return y

    def _activation(self, up: Any) -> Tensor:
        """From the output or outputs of ``up`` to the input of ``down``."""
        raise NotImplementedError


class MLP(_ColumnRowPair):
    """down(gelu(up(x))). Input and output [.., hidden_size]; ``ffn_size`` is split over the tensor ranks."""

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int | None = None,
        bias: bool = True,
        *,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ffn_size = default_ffn_size("gelu", hidden_size) if ffn_size is None else ffn_size
        self.up = Linear(hidden_size, ffn_size, bias, dtype=dtype, split="column", init=init, bias_init=bias_init)
        self.down = Linear(ffn_size, hidden_size, bias, dtype=dtype, split="row", init=out_init, bias_init=bias_init)

    def _activation(self, up: Any) -> Tensor:
        return F.gelu(up)


class TanhMLP(MLP):
    """`MLP` with the tanh approximation of gelu (1606.08415), which GPT-2 has."""

    def _activation(self, up: Any) -> Tensor:
        return F.gelu(up, approximate="tanh")


class GatedMLP(_ColumnRowPair):
    """SwiGLU (2002.05202): down(silu(gate(x)) * up(x)), gate and up in one matmul; ``ffn_size`` is that of each."""

    num_outputs = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int | None = None,
        bias: bool = False,
        *,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ffn_size = default_ffn_size("swiglu", hidden_size) if ffn_size is None else ffn_size
        outputs = {"gate": ffn_size, "value": ffn_size}
        self.up = Linear(hidden_size, outputs, bias, dtype=dtype, split="column", init=init, bias_init=bias_init)
        self.down = Linear(ffn_size, hidden_size, bias, dtype=dtype, split="row", init=out_init, bias_init=bias_init)

    def _activation(self, up: Any) -> Tensor:
        gate, value = up
        return F.silu(gate) * value
