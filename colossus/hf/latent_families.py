"""The families with latent attention: DeepSeek-V2 and V3, and the models of others that have their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from colossus.hf.families import Llama, llama_keys
from colossus.hf.family import Key, Part, Row, module, row
from colossus.hf.moe_families import expert_rows
from colossus.registry import HF_FAMILIES

_KEYS = (
    Key("kv_lora_rank", "latent.kv_rank", 512),
    Key("q_lora_rank", "latent.q_rank"),
    Key("qk_nope_head_dim", "latent.nope_dim", 128),
    Key("qk_rope_head_dim", "latent.rope_dim", 64),
    Key("v_head_dim", "latent.value_dim", 128),
    Key("n_routed_experts", "experts.num", 256),
    Key("num_experts_per_tok", "experts.top_k", 8),
    Key("moe_intermediate_size", "experts.ffn_size", 2048),
    Key("first_k_dense_replace", "experts.first_dense", 3),
    Key("routed_scaling_factor", "experts.scale", 2.5),
    Key("n_group", "experts.groups", 8),
    Key("topk_group", "experts.top_groups", 4),
)


def latent_keys(**defaults: Any) -> tuple[Key, ...]:
    """Return the keys of latent attention and experts of DeepSeek-V3, with other defaults."""
    return tuple(replace(key, default=defaults.get(key.theirs, key.default)) for key in _KEYS)


@HF_FAMILIES.register("deepseek_v3")
class DeepseekV3(Llama):
    """DeepSeek-V3 and Kimi K2: ``LlamaOptions`` with ``latent``, and ``experts`` behind the first layers."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    ours: ClassVar[tuple[str, ...]] = ("Llama",)
    keys: ClassVar[tuple[Key, ...]] = (
        *llama_keys(
            "attention_bias",
            "mlp_bias",
            "num_key_value_heads",
            "head_dim",
            num_hidden_layers=61,
            hidden_size=7168,
            num_attention_heads=128,
            intermediate_size=18432,
            max_position_embeddings=4096,
            vocab_size=129280,
        ),
        *latent_keys(),
        Key("norm_topk_prob", "experts.norm_topk", True),
    )
    required: ClassVar[Mapping[str, Any]] = dict(
        attention_bias=False, rope_interleave=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        "norm": "rmsnorm", "bias": False,
        "experts.score": "sigmoid", "experts.every": 1, "experts.capacity": None,
        "experts.bias": False, "experts.limit": None,
    }  # fmt: skip
    derived = ("num_kv_heads", "head_dim")
    #: its layer for multi-token prediction
    ignored = (*Llama.ignored, "model.layers.61.*")
    #: the bias of the choice of experts; a folder says nothing of its updates
    bias_update: ClassVar[float | None] = 0.0
    #: heads, and experts that form the shared one, where the config has no key for them
    default_heads: ClassVar[int] = 128
    default_shared: ClassVar[int] = 1

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        heads = config.get("num_attention_heads") or self.default_heads
        if config.get("num_key_value_heads") not in (None, heads):
            problems.append(
                f"num_key_value_heads = {config['num_key_value_heads']!r}: latent attention has one for each of the "
                f"num_attention_heads = {heads}"
            )
        spec = super().to_spec({"q_lora_rank": 1536, **config}, overrides, problems)
        experts = spec["experts"]
        count = config.get("n_shared_experts", self.default_shared)
        experts |= {"shared": (count or 0) * experts["ffn_size"] or None, "bias_update": self.bias_update}
        return spec

    def to_config(self, options: Any) -> dict[str, Any]:
        experts = options.experts
        return super().to_config(options) | {
            "num_key_value_heads": options.num_heads,
            "n_shared_experts": experts.shared // experts.ffn_size,
            "num_nextn_predict_layers": 0,
        }

    def differences(self, options: Any) -> list[str]:
        differences, experts = super().differences(options), options.experts
        if options.latent is None:
            differences.append("latent = None")
        if experts is None:
            return differences
        if not experts.shared or experts.shared % experts.ffn_size:
            differences.append(f"experts.shared = {experts.shared} (no multiple of ffn_size = {experts.ffn_size})")
        if (experts.bias_update is None) != (self.bias_update is None):
            differences.append(
                f"experts.bias_update = {experts.bias_update} ({'not None' if self.bias_update is None else 'no bias'})"
            )
        return differences

    def attention_rows(self, options: Any) -> list[Row]:
        hidden, heads, latent = options.hidden_size, options.num_heads, options.latent
        theirs, ours = "model.layers.*.self_attn", "blocks.*.attention"
        queries = heads * latent.head_dim
        rows = [row(f"{theirs}.q_proj.weight", f"{ours}.q_up.weight", queries, hidden)]
        if latent.q_rank is not None:
            rows = [
                row(f"{theirs}.q_a_proj.weight", f"{ours}.down.query.weight", latent.q_rank, hidden),
                row(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_norm.weight", latent.q_rank),
                row(f"{theirs}.q_b_proj.weight", f"{ours}.q_up.weight", queries, latent.q_rank),
            ]
        down = ("latent", latent.kv_rank), ("rotary", latent.rope_dim)
        parts = tuple(Part(f"{ours}.down.{name}.weight", (size, hidden)) for name, size in down)
        width = heads * (latent.nope_dim + latent.value_dim)
        return [
            *rows,
            Row(f"{theirs}.kv_a_proj_with_mqa.weight", parts),
            row(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.weight", latent.kv_rank),
            row(f"{theirs}.kv_b_proj.weight", f"{ours}.kv_up.weight", width, latent.kv_rank),
            row(f"{theirs}.o_proj.weight", f"{ours}.out.weight", hidden, heads * latent.value_dim),
        ]

    def mlp_rows(self, options: Any) -> list[Row]:
        hidden, experts, theirs = options.hidden_size, options.experts, "model.layers.*.mlp"
        is_sparse = [experts.is_in(layer) for layer in range(options.num_layers)]
        dense, sparse = ([n for n, has in enumerate(is_sparse) if has is wanted] for wanted in (False, True))
        rows = []
        if experts.bias_update is not None:
            rows.append(row(f"{theirs}.gate.e_score_correction_bias", "blocks.*.mlp.router.bias", experts.num))
        for their, our in (("gate_proj", "up.gate"), ("up_proj", "up.value")):
            rows += module(
                f"{theirs}.shared_experts.{their}", f"blocks.*.mlp.shared.{our}", experts.shared, hidden, bias=False
            )
        rows += module(
            f"{theirs}.shared_experts.down_proj", "blocks.*.mlp.shared.down", hidden, experts.shared, bias=False
        )
        return [
            *(replace(row, layers=dense) for row in super().mlp_rows(options)),
            *(replace(row, layers=sparse) for row in rows),
            *expert_rows(options, theirs, ("gate_proj", "up_proj", "down_proj")),
        ]


@HF_FAMILIES.register("deepseek_v2")
class DeepseekV2(DeepseekV3):
    """DeepSeek-V2 and V2-Lite: softmax scores, weights of experts that do not add up to 1, and no bias."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    keys = (
        *llama_keys("attention_bias", "mlp_bias", "num_key_value_heads", "head_dim", vocab_size=102400),
        *latent_keys(
            n_routed_experts=64,
            num_experts_per_tok=None,
            moe_intermediate_size=1407,
            first_k_dense_replace=0,
            routed_scaling_factor=1.0,
            n_group=None,
            topk_group=None,
        ),
    )
    required = dict(
        attention_bias=False, mlp_bias=False, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1
    )
    fixed = {**DeepseekV3.fixed, "experts.score": "softmax", "experts.norm_topk": False}
    bias_update = None
    default_heads = 32
    default_shared = 2

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        method = config.get("topk_method") or "greedy"
        if method == "greedy":
            config = {**config, "n_group": None, "topk_group": None}
        elif method != "group_limited_greedy":
            problems.append(f"topk_method = {method!r}: it must be one of 'greedy', 'group_limited_greedy'")
        return super().to_spec(config, overrides, problems)

    def to_config(self, options: Any) -> dict[str, Any]:
        method = "greedy" if options.experts.groups is None else "group_limited_greedy"
        return super().to_config(options) | {"topk_method": method}
