"""The families with mixtures of experts: Mixtral and Qwen3-MoE. In their files each expert has tensors of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from colossus.hf.families import Llama, Qwen3, llama_keys
from colossus.hf.family import Key, Row, row
from colossus.registry import HF_FAMILIES

#: options with one value in both families; transformers has no bias of the choice and no limit of an expert's tokens
FIXED: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "bias": False,
    "experts.shared": None,
    "experts.bias": False,
    "experts.limit": None,
    "experts.score": "softmax",
    "experts.scale": 1.0,
    "experts.groups": None,
    "experts.top_groups": None,
    "experts.first_dense": 0,
    "experts.bias_update": None,
    "experts.capacity": None,
}


def expert_rows(options: Any, theirs: str, names: Sequence[str]) -> list[Row]:
    """Return the rows of the layers with experts.

    Args:
        theirs: the module that replaces the MLP.
        names: the names of gate, up and down in ``theirs.experts.0``.
    """
    hidden, experts = options.hidden_size, options.experts
    inner, outer = (experts.num, experts.ffn_size, hidden), (experts.num, hidden, experts.ffn_size)
    rows = [row(f"{theirs}.gate.weight", "blocks.*.mlp.router.weight", experts.num, hidden)]
    for name, ours, shape in zip(names, ("gate", "up", "down"), (inner, inner, outer), strict=True):
        rows += [
            row(f"{theirs}.experts.{number}.{name}.weight", f"blocks.*.mlp.experts.{ours}", *shape, index=number)
            for number in range(experts.num)
        ]
    layers = [layer for layer in range(options.num_layers) if experts.is_in(layer)]
    return [replace(row, layers=layers) for row in rows]


@HF_FAMILIES.register("mixtral")
class Mixtral(Llama):
    """Mixtral: ``LlamaOptions`` with ``experts`` in all layers."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    ours = ("Llama",)
    keys = (
        *llama_keys(
            "attention_bias",
            "mlp_bias",
            intermediate_size=14336,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        ),
        Key("num_local_experts", "experts.num", 8),
        Key("num_experts_per_tok", "experts.top_k", 2),
        Key("sliding_window", "window"),
    )
    required: ClassVar[Mapping[str, Any]] = dict(router_jitter_noise=0.0)
    fixed = {**FIXED, "experts.norm_topk": True, "experts.every": 1}
    derived: ClassVar[tuple[str, ...]] = ("attention_pattern",)

    def differences(self, options: Any) -> list[str]:
        differences, experts = super().differences(options), options.experts
        if experts is not None and experts.ffn_size != options.ffn_hidden_size:
            differences.append(
                f"experts.ffn_size = {experts.ffn_size} (not ffn_hidden_size = {options.ffn_hidden_size})"
            )
        return differences

    def mlp_rows(self, options: Any) -> list[Row]:
        return expert_rows(options, "model.layers.*.block_sparse_moe", ("w1", "w3", "w2"))


@HF_FAMILIES.register("qwen3_moe")
class Qwen3MoE(Qwen3):
    """Qwen3-MoE: ``LlamaOptions`` with ``qk_norm`` and ``experts``."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    ours = ("Llama",)
    keys = (
        *llama_keys(
            "attention_bias",
            "mlp_bias",
            num_hidden_layers=24,
            hidden_size=2048,
            num_attention_heads=32,
            num_key_value_heads=4,
            intermediate_size=6144,
            max_position_embeddings=32768,
            vocab_size=151936,
        ),
        Key("num_experts", "experts.num", 128),
        Key("num_experts_per_tok", "experts.top_k", 8),
        Key("moe_intermediate_size", "experts.ffn_size", 768),
        Key("norm_topk_prob", "experts.norm_topk", False),
        Key("decoder_sparse_step", "experts.every", 1),
    )
    required = dict(Qwen3.required, mlp_only_layers=[])
    fixed = {**FIXED, "qk_norm": True}

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        """Return our model as a spec; transformers 5 writes ``num_local_experts`` and reads both keys."""
        return super().to_spec({"num_experts": config.get("num_local_experts"), **config}, overrides, problems)

    def mlp_rows(self, options: Any) -> list[Row]:
        dense = [layer for layer in range(options.num_layers) if not options.experts.is_in(layer)]
        mlps = [replace(row, layers=dense) for row in super().mlp_rows(options)]
        return [*mlps, *expert_rows(options, "model.layers.*.mlp", ("gate_proj", "up_proj", "down_proj"))]
