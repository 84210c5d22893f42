"""The FLOPs of a model, counted by its options and by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from colossus.construct.build_model import build
from colossus.models.gpt import GPT

MODELS: dict[str, dict[str, Any]] = {
    "gelu_layernorm_tied": dict(),
    "swiglu_rmsnorm": dict(mlp="swiglu", norm="rmsnorm", bias=False),
    "grouped_query_rotary": dict(num_kv_heads=2, positions="rotary"),
    "heads_of_their_own_size": dict(head_dim=5, num_kv_heads=2),
    "one_kv_head_untied": dict(num_kv_heads=1, tie_embeddings=False),
    "swiglu_untied_odd_sizes": dict(mlp="swiglu", ffn_hidden_size=37, vocab_size=29, tie_embeddings=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_is_what_torch_counts(name: str) -> None:
    """Attention as matmuls: FlopCounterMode counts them in full, causal or not, and a flash kernel's recomputation."""
    sizes = dict(num_layers=2, hidden_size=32, num_heads=4, vocab_size=40, seq_len=12)
    options: dict[str, Any] = {**sizes, **MODELS[name]}
    model = build(lambda: GPT(**options))
    batch = 3
    ids = torch.arange(batch * 12).view(batch, 12) % options["vocab_size"]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss, _ = model.loss(model(ids), {"labels": ids})
        loss.backward()
    assert counter.get_total_flops() == batch * 12 * model.options.flops_per_token()
