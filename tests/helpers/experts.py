"""Mixtures of experts that a GPT of a test takes for its MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

from helpers.training import config_of

from colossus.layers.moe import MoE
from colossus.registry import MLPS

NUM_EXPERTS, TOP_K = 4, 2

#: name of an MLP -> further options of its experts
KINDS: dict[str, dict[str, Any]] = {
    "experts": {},
    "experts_with_losses": dict(aux_loss=0.05, z_loss=0.01),
    "experts_with_bias": dict(router=dict(score="sigmoid", bias_update=0.02), shared=12),
}


def _experts(options: dict[str, Any], hidden_size: int, ffn_size: int, bias: bool, **inits: Any) -> MoE:
    inits.pop("bias_init")
    return MoE(hidden_size, ffn_size, NUM_EXPERTS, TOP_K, **options, **inits)


for _kind, _options in KINDS.items():
    MLPS.register(f"tested_{_kind}")(partial(_experts, _options))


def config_of_experts(plan: dict[str, Any], steps: int, kind: str = "experts", **more: Any) -> dict[str, Any]:
    model = dict(mlp=f"tested_{kind}", ffn_hidden_size=20, norm="rmsnorm", bias=False, **more.pop("model", {}))
    return config_of(plan, steps, "fp64", model=model, **more)
