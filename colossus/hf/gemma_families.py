"""Gemma 2 and 3 (text): local and global layers, norms on both sides, scaled embeddings, capped scores or logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from colossus.hf.families import Llama, llama_keys, write_rope
from colossus.hf.family import Key, Row, row
from colossus.registry import HF_FAMILIES

KINDS = {"sliding_attention": "local", "full_attention": "global"}


def read_layer_types(config: Mapping[str, Any], period: int, problems: list[str]) -> tuple[str, ...]:
    """Return our ``attention_pattern``.

    Args:
        period: every so many layers one is global where the config names no layers.
    """
    types = config.get("layer_types")
    if types is None:
        return ("local",) * (period - 1) + ("global",)
    if unknown := sorted(set(types) - KINDS.keys()):
        problems.append(f"layer_types: {', '.join(map(repr, unknown))}; colossus has {', '.join(map(repr, KINDS))}")
        return ("global",)
    pattern = tuple(KINDS[kind] for kind in types)
    length = next(n for n in range(1, len(pattern) + 1) if (pattern[:n] * len(pattern))[: len(pattern)] == pattern)
    return pattern[:length]


def write_layer_types(options: Any) -> list[str]:
    """Return the ``layer_types`` of a config."""
    names = {ours: theirs for theirs, ours in KINDS.items()}
    return [names["local" if options.is_local(layer) else "global"] for layer in range(options.num_layers)]


@HF_FAMILIES.register("gemma2")
class Gemma2(Llama):
    """Gemma 2: every second layer has a window; scores and logits are capped."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    ours = ("Llama",)
    keys = (
        *llama_keys(
            "attention_bias", "mlp_bias", "hidden_act", num_hidden_layers=26, hidden_size=2304, num_attention_heads=8,
            num_key_value_heads=4, head_dim=256, intermediate_size=9216, max_position_embeddings=8192,
            vocab_size=256000, tie_word_embeddings=True,
        ),
        Key("hidden_activation", "mlp", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu_tanh"}),
        Key("sliding_window", "window"),
        Key("attn_logit_softcapping", "soft_cap"),
        Key("final_logit_softcapping", "logit_cap"),
    )  # fmt: skip
    required: ClassVar[Mapping[str, Any]] = dict(attention_bias=False, use_bidirectional_attention=False)
    fixed = dict(positions="rotary", norm="zero_centered_rmsnorm", norm_place="both", bias=False)
    written: ClassVar[tuple[str, ...]] = ("rotary_scaling", "attention_pattern", "attention_scale", "embedding_scale")
    #: of so many layers the last is global where a config names no kinds; values of keys that it lacks
    period: ClassVar[int] = 2
    defaults: ClassVar[Mapping[str, Any]] = dict(
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        config = {**self.defaults, **config}
        spec = super().to_spec(config, overrides, problems)
        if spec.get("window") is not None:
            spec["attention_pattern"] = read_layer_types(config, self.period, problems)
            if "local" not in spec["attention_pattern"]:
                del spec["window"]
        spec["attention_scale"] = (config.get("query_pre_attn_scalar") or 256) ** -0.5
        return spec | {"embedding_scale": spec["hidden_size"] ** 0.5}

    def to_config(self, options: Any) -> dict[str, Any]:
        scale = options.attention_scale or options.head_dim**-0.5
        kinds = {"layer_types": write_layer_types(options), "query_pre_attn_scalar": round(scale**-2)}
        return super().to_config(options) | kinds

    def differences(self, options: Any) -> list[str]:
        differences, root = super().differences(options), options.hidden_size**0.5
        if options.embedding_scale != root:
            differences.append(f"embedding_scale = {options.embedding_scale} (not hidden_size ** 0.5 = {root})")
        scale = options.attention_scale or options.head_dim**-0.5
        if round(scale**-2) ** -0.5 != scale:
            differences.append(f"attention_scale = {scale} (not the root of 1 over a whole number)")
        return differences

    def rows(self, options: Any) -> Sequence[Row]:
        """Return the rows of `Llama` with another name of one norm, and those of the norms behind sublayers."""
        layer, hidden = "model.layers.*", options.hidden_size
        renamed = {f"{layer}.post_attention_layernorm.weight": f"{layer}.pre_feedforward_layernorm.weight"}
        *rows, norm, head = (replace(row, name=renamed.get(row.name, row.name)) for row in super().rows(options))
        behind = {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "mlp_out_norm"}
        more = [row(f"{layer}.{theirs}.weight", f"blocks.*.{ours}.weight", hidden) for theirs, ours in behind.items()]
        return [*rows, *more, norm, head]


@HF_FAMILIES.register("gemma3_text")
class Gemma3(Gemma2):
    """Gemma 3, the language model: five of six layers have a window and a rotary base of their own; `qk_norm`."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    keys = tuple(
        replace(key, default={"vocab_size": 262208, "max_position_embeddings": 131072}.get(key.theirs, key.default))
        for key in Gemma2.keys
        if key.theirs not in ("rope_theta", "attn_logit_softcapping")
    )
    #: transformers ignores this key
    required = {**Gemma2.required, "attn_logit_softcapping": None}
    fixed = {**Gemma2.fixed, "qk_norm": True}
    written = (*Gemma2.written, "rotary_base", "rotary_base_local")
    period = 6
    defaults = dict(sliding_window=4096)

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        """Return our model as a spec; transformers 5 has a dict of ``rope_parameters`` for each kind of layer."""
        kinds = config.get("rope_parameters") or {}
        local = {"rope_theta": config.get("rope_local_base_freq"), **kinds.get("sliding_attention", {})}
        whole = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
        whole |= kinds.get("full_attention", {})
        if local.pop("rope_type", "default") != "default":
            problems.append("rope_parameters: colossus scales no rotary positions of layers with sliding_attention")
        own = {name: value for name, value in config.items() if not name.startswith("rope_")}
        own["rope_parameters"] = {**whole, "rope_theta": whole["rope_theta"] or 1e6}
        spec = super().to_spec(own, overrides, problems)
        if "window" in spec:
            spec["rotary_base_local"] = local["rope_theta"] or 1e4
        return spec

    def to_config(self, options: Any) -> dict[str, Any]:
        local = {"rope_type": "default", "rope_theta": options.rotary_base_local or options.rotary_base}
        rope = {"full_attention": write_rope(options)["rope_parameters"], "sliding_attention": local}
        config = super().to_config(options) | {"rope_parameters": rope}
        return {name: value for name, value in config.items() if name != "rope_scaling"}

    def differences(self, options: Any) -> list[str]:
        differences = super().differences(options)
        if options.window and options.rotary_scaling is not None and options.rotary_base_local is None:
            differences.append("rotary_base_local = None with rotary_scaling, which local layers do not have")
        return differences
