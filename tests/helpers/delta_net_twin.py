"""The oracle of Gated DeltaNet: transformers' own module of Qwen3-Next, in float64, from weights by our names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as theirs


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
