"""The pre-norm transformer block and its two-layer perceptrons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.error_place import located_error
from colossus.layers.attention import Attention
from colossus.layers.block_options import default_ffn_size, default_norm_eps
from colossus.layers.checkpointing import checkpoint_module
from colossus.layers.dropout import Dropout
from colossus.layers.gated_delta_net import GatedDeltaNet
from colossus.layers.latent_attention import LatentAttention
from colossus.layers.layer import Layer, call
from colossus.layers.linear import Linear
from colossus.layers.moe import MoE
from colossus.layout.parameter import Initializer
from colossus.registry import MLPS, NORMS
from colossus.sharded_tensor.placement import placement_of
from colossus.sharded_tensor.regions import local, require_sequences
from colossus.sharded_tensor.tensor import plain_of_graph, wrap

#: numbers that a CPU's vector units compute at a time, unrolled
_VECTORS = 32


class MLP(Layer):
    """A perceptron: down(gelu(up(x))). Input and output [.., hidden_size]; tensor ranks split ``ffn_size``."""

    is_reproducible = True

    #: its name in `colossus.registry.MLPS`, and the outputs of ``up`` if that is fused
    kind = "gelu"
    outputs: tuple[str, ...] = ()

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
        size = default_ffn_size(self.kind, hidden_size) if ffn_size is None else ffn_size
        outputs = dict.fromkeys(self.outputs, size) or size
        self.up = Linear(hidden_size, outputs, bias, dtype=dtype, split="column", init=init, bias_init=bias_init)
        self.down = Linear(size, hidden_size, bias, dtype=dtype, split="row", init=out_init, bias_init=bias_init)

    def forward(self, x: Tensor) -> Tensor:
        up = call(self.up, x, self.parallel, self.parallel.regions.inner, outputs=len(self.outputs) or None)
        hidden = self._activation(up)
        self._require_no_tail(hidden)
        y: Tensor = call(self.down, hidden, self.parallel)
        return y

    def _require_no_tail(self, hidden: Tensor) -> None:
        """Raise ValueError where a CPU's vector units leave a rest, which has other bits than in a larger tensor."""
        if not self.context.options.reproducible or self.parallel.shardings is None or hidden.device.type != "cpu":
            return
        if (size := local(hidden).numel()) % _VECTORS:
            raise located_error(
                f"train.reproducible = 'plan': a tensor rank has {size} numbers inside of {self.title}; tokens of a "
                f"sample x ffn_size / tensor ranks must be a multiple of {_VECTORS}"
            )

    def _activation(self, up: Any) -> Tensor:
        """Return the input of ``down`` for the output or outputs of ``up``."""
        return F.gelu(up)


class TanhMLP(MLP):
    """`MLP` with the tanh approximation of gelu (1606.08415), as in GPT-2."""

    def _activation(self, up: Any) -> Tensor:
        return F.gelu(up, approximate="tanh")


class GatedMLP(MLP):
    """SwiGLU (2002.05202): down(silu(gate(x)) * up(x)), gate and up in one matmul; ``ffn_size`` is that of each.

    The arguments are those of `MLP`, but there is no bias by default.
    """

    kind = "swiglu"
    outputs = ("gate", "value")

    def __init__(self, hidden_size: int, ffn_size: int | None = None, bias: bool = False, **options: Any) -> None:
        super().__init__(hidden_size, ffn_size, bias, **options)

    def _activation(self, up: Any) -> Tensor:
        gate, value = up
        return F.silu(gate) * value


class TanhGatedMLP(GatedMLP):
    """GeGLU (2002.05202) with the tanh approximation of gelu, as in Gemma: down(gelu(gate(x)) * up(x))."""

    kind = "geglu_tanh"

    def _activation(self, up: Any) -> Tensor:
        gate, value = up
        return F.gelu(gate, approximate="tanh") * value


class TransformerBlock(Layer):
    """A block of attention and MLP: x + attention(norm(x)), then x + mlp(norm(x)).

    Input and output [batch, tokens, hidden_size]; the output has the layout of the input. A plain tensor gives a plain
    tensor; between ``to_residual`` and ``to_whole`` activations stay split by the mode.

    Args:
        ffn_size: features inside the MLP; by default 4 x hidden_size, for ``swiglu`` 8/3 x hidden_size, rounded up to a
            multiple of 64.
        norm, mlp: names in `colossus.registry.NORMS` and `MLPS`.
        experts: arguments of the `MoE` that replaces the MLP.
        norm_place: norms ``before`` attention and MLP; ``after`` them, x + norm(attention(x)) (OLMo 2); or ``both``
            (Gemma).
        latent: sizes of the `LatentAttention` that replaces the `Attention`.
        linear: sizes of the `GatedDeltaNet` that replaces it; it takes no further arguments.
        norm_eps: epsilon of all norms; by default 1e-5 for ``layernorm`` and 1e-6 for ``rmsnorm``.
        attention: further arguments of `Attention` or `LatentAttention`.
        activation_checkpoint: ``none``, ``full`` (recompute the block in backward) or ``selective`` (keep matmuls,
            attention and collectives, recompute the rest); ``train.activation_checkpoint`` sets it for any model.
    """

    is_reproducible = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        ffn_size: int | None = None,
        *,
        bias: bool = True,
        norm: str = "layernorm",
        norm_place: str = "before",
        norm_eps: float | None = None,
        mlp: str = "gelu",
        experts: Mapping[str, Any] | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        latent: Mapping[str, Any] | None = None,
        linear: Mapping[str, Any] | None = None,
        activation_checkpoint: str = "none",
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        inits: dict[str, Any] = {"init": init, "out_init": out_init, "bias_init": bias_init}

        def make(place: str) -> nn.Module | None:
            return make_norm(norm, hidden_size, bias, norm_eps) if norm_place in (place, "both") else None

        self.attention_norm = make("before")
        attention |= inits | {"bias": bias, "dropout": attention_dropout}
        self.attention: nn.Module
        if linear is not None:
            eps = default_norm_eps("rmsnorm") if norm_eps is None else norm_eps
            self.attention = GatedDeltaNet(hidden_size, **linear, norm_eps=eps, init=init, out_init=out_init)
        elif latent is not None:
            self.attention = LatentAttention(hidden_size, num_heads, **attention, **latent)
        else:
            self.attention = Attention(hidden_size, num_heads, num_kv_heads, norm_eps=norm_eps, **attention)
        self.attention_out_norm = make("after")
        self.mlp_norm = make("before")
        self.mlp: nn.Module
        if experts is None:
            self.mlp = MLPS.get(mlp)(hidden_size, ffn_size, bias, **inits)
        else:
            self.mlp = MoE(hidden_size, init=init, out_init=out_init, **experts)
        self.mlp_out_norm = make("after")
        self.attention_dropout = Dropout(dropout)
        self.mlp_dropout = Dropout(dropout)
        if activation_checkpoint != "none":
            checkpoint_module(self, activation_checkpoint, self.context)

    def forward(self, x: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        require_sequences(x)
        if torch.compiler.is_compiling():
            placement = placement_of(x)
            x = wrap(plain_of_graph(x), placement)
        normal = self._normed(self.attention_norm, x)
        attended = call(self.attention, normal, self.parallel, mask=mask, documents=documents)
        attended = self._normed(self.attention_out_norm, attended)
        x = x + call(self.attention_dropout, attended, self.parallel)
        out = call(self.mlp, self._normed(self.mlp_norm, x), self.parallel)
        out = self._normed(self.mlp_out_norm, out)
        y: Tensor = x + call(self.mlp_dropout, out, self.parallel)
        return y

    def _normed(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        y: Tensor = x if norm is None else call(norm, x, self.parallel)
        return y


def make_norm(norm: str, hidden_size: int, bias: bool, eps: float | None = None) -> nn.Module:
    """Return a norm of `colossus.registry.NORMS` over the features; RMSNorm has no bias."""
    options = {} if norm.endswith("rmsnorm") else {"bias": bias}
    module: nn.Module = NORMS.get(norm)(hidden_size, default_norm_eps(norm) if eps is None else eps, **options)
    return module
