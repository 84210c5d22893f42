"""gpt-oss: experts with biases and a clamped gate, sinks, local and global layers, YaRN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from colossus.hf.families import llama_keys
from colossus.hf.family import Key, Row, row
from colossus.hf.gemma_families import read_layer_types, write_layer_types
from colossus.hf.moe_families import FIXED, Mixtral
from colossus.registry import HF_FAMILIES


@HF_FAMILIES.register("gpt_oss")
class GptOss(Mixtral):
    """gpt-oss: ``LlamaOptions`` with ``experts``, ``sinks``, and a ``window`` in every second layer.

    Its published folders have experts in MXFP4, which is refused.
    """

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    keys = (
        *llama_keys(
            "mlp_bias", num_hidden_layers=36, hidden_size=2880, num_attention_heads=64, num_key_value_heads=8,
            head_dim=64, intermediate_size=2880, max_position_embeddings=131072, vocab_size=201088, rms_norm_eps=1e-5,
            attention_bias=True, rope_theta=150000.0,
        ),
        Key("num_local_experts", "experts.num", 128),
        Key("num_experts_per_tok", "experts.top_k", 4),
        Key("swiglu_alpha", "experts.alpha", 1.702),
        Key("swiglu_limit", "experts.limit", 7.0),
        Key("sliding_window", "window"),
    )  # fmt: skip
    fixed = {
        **{name: value for name, value in FIXED.items() if name not in ("bias", "experts.limit")},
        "experts.norm_topk": True, "experts.every": 1, "experts.bias": True, "sinks": True,
    }  # fmt: skip
    required: ClassVar[Mapping[str, Any]] = {}
    written = ("rotary_scaling", "attention_pattern")
    derived: ClassVar[tuple[str, ...]] = ()

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        yarn = dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)
        defaults = {"sliding_window": 128, "rope_parameters": config.get("rope_scaling") or yarn}
        config = {**defaults, **config}
        if config.get("quantization_config"):
            problems.append(
                "experts in MXFP4: let transformers write them in bfloat16 first, GptOssForCausalLM.from_pretrained("
                "folder, dtype='bfloat16', quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(other)"
            )
        spec = super().to_spec(config, overrides, problems)
        if spec.get("window") is not None:
            pattern = ("local", "global") if config.get("layer_types") is None else None
            spec["attention_pattern"] = pattern or read_layer_types(config, 2, problems)
            if "local" not in spec["attention_pattern"]:
                del spec["window"]
        return spec

    def to_config(self, options: Any) -> dict[str, Any]:
        return super().to_config(options) | {"layer_types": write_layer_types(options)}

    def differences(self, options: Any) -> list[str]:
        differences, experts = super().differences(options), options.experts
        if experts is not None and experts.limit is None:
            differences.append("experts.limit = None (not a number)")
        return differences

    def attention_rows(self, options: Any) -> list[Row]:
        sinks = row("model.layers.*.self_attn.sinks", "blocks.*.attention.sinks", options.num_heads)
        return [sinks, *super().attention_rows(options)]

    def mlp_rows(self, options: Any) -> list[Row]:
        num, wide, hidden = options.experts.num, options.experts.ffn_size, options.hidden_size
        theirs, ours = "model.layers.*.mlp", "blocks.*.mlp"
        inside = [f"{ours}.experts.gate", f"{ours}.experts.up"]
        biases = [f"{name}_bias" for name in inside]
        weight = {"transposed": True, "interleaved": True, "file_shape": (num, hidden, 2 * wide)}
        return [
            row(f"{theirs}.router.weight", f"{ours}.router.weight", num, hidden),
            row(f"{theirs}.router.bias", f"{ours}.router.logit_bias", num),
            row(f"{theirs}.experts.gate_up_proj", inside, num, wide, hidden, **weight),
            row(f"{theirs}.experts.gate_up_proj_bias", biases, num, wide, interleaved=True, file_shape=(num, 2 * wide)),
            row(
                f"{theirs}.experts.down_proj", f"{ours}.experts.down", num, hidden, wide, transposed=True,
                file_shape=(num, wide, hidden),
            ),
            row(f"{theirs}.experts.down_proj_bias", f"{ours}.experts.down_bias", num, hidden),
        ]  # fmt: skip
