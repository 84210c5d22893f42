"""The oracle of Gated DeltaNet: transformers' own module of Qwen3-Next, in float64, from weights by our names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from colossus.layers.block_options import LinearOptions


@contextmanager
def _in_float64() -> Iterator[None]:
    """Let transformers compute in float64 what it computes in float32 whatever the dtype."""
    wide = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    with patch.object(theirs, "torch", wide), patch.object(Tensor, "float", lambda x: x):
        yield


def delta_net(
    p: Mapping[str, Tensor],
    x: Tensor,
    documents: Tensor | None = None,
    *,
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    kernel_size: int = 4,
    eps: float = 1e-6,
) -> Tensor:
    """The output for x [batch, tokens, hidden]: of each document by itself.

    Args:
        p: parameters by the names of `colossus.layers.GatedDeltaNet`.
    """
    config = Qwen3NextConfig(
        hidden_size=x.shape[-1], num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8,
        linear_num_value_heads=heads, linear_num_key_heads=key_heads, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim, linear_conv_kernel_dim=kernel_size, rms_norm_eps=eps,
        layer_types=["linear_attention"],
    )  # fmt: skip
    module = theirs.Qwen3NextGatedDeltaNet(config, 0).double()
    # theirs has all of a key head side by side: query, key, values, gates; and beta, decay
    q, k, v, z, b, a = (
        p[f"qkv.{name}.weight"].unflatten(0, (key_heads, -1))
        for name in ("query", "key", "value", "gate", "beta", "decay")
    )
    weights = {
        "in_proj_qkvz.weight": torch.cat((q, k, v, z), 1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat((b, a), 1).flatten(0, 1),
        "conv1d.weight": torch.cat([p[f"conv_{name}"] for name in ("query", "key", "value")]).unsqueeze(1),
        "A_log": p["A_log"],
        "dt_bias": p["dt_bias"],
        "norm.weight": p["norm.weight"],
        "out_proj.weight": p["out.weight"],
    }

    def run(x: Tensor) -> Tensor:
        with _in_float64():
            y: Tensor = torch.func.functional_call(module, weights, (x,), strict=True)
        return y

    if documents is None:
        return run(x)
    rows = []
    for row, numbers in zip(x, documents, strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        rows.append(torch.cat([run(part[None])[0] for part in row.split(lengths)]))
    return torch.stack(rows)


class PlainDeltaNet(nn.Module):
    """The oracle as a module with the names and shapes of our parameters."""

    def __init__(self, hidden: int, sizes: LinearOptions, eps: float) -> None:
        super().__init__()
        heads, key_heads = sizes.num_heads, sizes.num_key_heads or sizes.num_heads
        self.eps = eps
        self.sizes: dict[str, int] = dict(
            heads=heads, key_heads=key_heads, key_dim=sizes.key_dim, value_dim=sizes.value_dim,
            kernel_size=sizes.kernel_size,
        )  # fmt: skip
        keys, values = key_heads * sizes.key_dim, heads * sizes.value_dim
        widths = {"query": keys, "key": keys, "value": values}
        more = {"gate": values, "beta": heads, "decay": heads}
        self.qkv = nn.ModuleDict({name: nn.Linear(hidden, width, False) for name, width in (widths | more).items()})
        for name, width in widths.items():
            self.register_parameter(f"conv_{name}", nn.Parameter(torch.zeros(width, sizes.kernel_size)))
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.norm = nn.RMSNorm(sizes.value_dim, eps)
        self.out = nn.Linear(values, hidden, False)

    def forward(self, x: Tensor) -> Tensor:
        return delta_net(dict(self.named_parameters()), x, eps=self.eps, **self.sizes)
