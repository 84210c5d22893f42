"""The families: Llama 1 to 3, Qwen3, GPT-2, and the vision transformer with its classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from colossus.checkpoint.weight_sources import LABELS
from colossus.hf.family import HEAD, TABLE, Family, Key, Row, module, row
from colossus.registry import HF_FAMILIES


def read_rope(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return our ``rotary_base`` and ``rotary_scaling``; their own options check the kind and its keys.

    transformers 5 has ``rope_parameters`` with the base in it, 4 has ``rope_theta`` and ``rope_scaling``.
    """
    stored = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(stored, Mapping):
        problems.append(f"rope_scaling = {stored!r}: an object is needed")
        return {}
    rope = {key: value for key, value in stored.items() if value is not None}
    old_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_kind)
    base = rope.pop("rope_theta", config.get("rope_theta"))
    spec = {} if base is None else {"rotary_base": base}
    partial = (rope.pop("partial_rotary_factor", None), config.get("partial_rotary_factor"))
    if any(factor not in (None, 1.0) for factor in partial):
        problems.append("partial_rotary_factor: colossus rotates whole heads only")
    if kind == "default":
        return spec
    length = config.get("max_position_embeddings")
    if kind == "llama3" and length is not None:
        rope.setdefault("original_max_position_embeddings", length)
    return spec | {"rotary_scaling": {**rope, "rope_type": kind}}


def write_rope(options: Any) -> dict[str, Any]:
    """Return the keys beside ``rope_theta`` that transformers 4 and 5 read."""
    scaling = None if options.rotary_scaling is None else options.rotary_scaling.keys
    return {
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": options.rotary_base, **(scaling or {"rope_type": "default"})},
    }


@HF_FAMILIES.register("llama")
class Llama(Family):
    """Llama 1 to 3: ``LlamaOptions``, or a ``GPT`` with the same options."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    ours: ClassVar[tuple[str, ...]] = ("Llama", "GPT")
    keys: ClassVar[tuple[Key, ...]] = (
        Key("num_hidden_layers", "num_layers", 32),
        Key("hidden_size", "hidden_size", 4096),
        Key("num_attention_heads", "num_heads", 32),
        Key("num_key_value_heads", "num_kv_heads"),
        Key("head_dim", "head_dim"),
        Key("intermediate_size", "ffn_hidden_size", 11008),
        Key("hidden_act", "mlp", "silu", {"silu": "swiglu", "swish": "swiglu"}),
        Key("max_position_embeddings", "seq_len", 2048),
        Key("vocab_size", "vocab_size", 32000),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("attention_bias", "bias", False),
        Key("mlp_bias", "bias", False),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("tie_word_embeddings", "tie_embeddings", False),
        Key("rope_theta", "rotary_base", 10000.0),
    )
    fixed: ClassVar[Mapping[str, Any]] = dict(positions="rotary", norm="rmsnorm")
    written: ClassVar[tuple[str, ...]] = ("rotary_scaling",)
    #: older versions saved the frequencies of the rotary positions
    ignored: ClassVar[tuple[str, ...]] = ("*rotary_emb.inv_freq",)

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        return super().to_spec(config, overrides, problems) | read_rope(config, problems)

    def to_config(self, options: Any) -> dict[str, Any]:
        return super().to_config(options) | write_rope(options)

    def rows(self, options: Any) -> Sequence[Row]:
        hidden, vocabulary = options.hidden_size, options.vocab_size
        return [
            row("model.embed_tokens.weight", TABLE, vocabulary, hidden),
            row("model.layers.*.input_layernorm.weight", "blocks.*.attention_norm.weight", hidden),
            *self.attention_rows(options),
            *self.mlp_rows(options),
            row("model.layers.*.post_attention_layernorm.weight", "blocks.*.mlp_norm.weight", hidden),
            row("model.norm.weight", "norm.weight", hidden),
            row("lm_head.weight", HEAD, vocabulary, hidden),
        ]

    def attention_rows(self, options: Any) -> list[Row]:
        hidden, theirs, ours = options.hidden_size, "model.layers.*.self_attn", "blocks.*.attention"
        queries, keys = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        norms = ("q_norm", "k_norm") if options.qk_norm else ()
        return [
            *module(f"{theirs}.q_proj", f"{ours}.qkv.query", queries, hidden, bias=options.bias),
            *module(f"{theirs}.k_proj", f"{ours}.qkv.key", keys, hidden, bias=options.bias),
            *module(f"{theirs}.v_proj", f"{ours}.qkv.value", keys, hidden, bias=options.bias),
            *module(f"{theirs}.o_proj", f"{ours}.out", hidden, queries, bias=options.bias),
            *(row(f"{theirs}.{norm}.weight", f"{ours}.{norm}.weight", options.head_dim) for norm in norms),
        ]

    def mlp_rows(self, options: Any) -> list[Row]:
        hidden, wide, theirs, ours = options.hidden_size, options.ffn_hidden_size, "model.layers.*.mlp", "blocks.*.mlp"
        return [
            *module(f"{theirs}.gate_proj", f"{ours}.up.gate", wide, hidden, bias=options.bias),
            *module(f"{theirs}.up_proj", f"{ours}.up.value", wide, hidden, bias=options.bias),
            *module(f"{theirs}.down_proj", f"{ours}.down", hidden, wide, bias=options.bias),
        ]


def llama_keys(*without: str, **defaults: Any) -> tuple[Key, ...]:
    """Return the keys of `Llama` with other defaults, without those that are named."""
    keys = (key for key in Llama.keys if key.theirs not in without)
    return tuple(replace(key, default=defaults.get(key.theirs, key.default)) for key in keys)


@HF_FAMILIES.register("qwen3")
class Qwen3(Llama):
    """Qwen3: ``LlamaOptions`` with ``qk_norm``, or a ``GPT`` with the same options."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    keys = llama_keys(
        "attention_bias",
        "mlp_bias",
        head_dim=128,
        intermediate_size=22016,
        max_position_embeddings=32768,
        vocab_size=151936,
    )
    required = dict(attention_bias=False, use_sliding_window=False)
    fixed = {**Llama.fixed, "qk_norm": True, "bias": False}


@HF_FAMILIES.register("mistral")
class Mistral(Llama):
    """Mistral: ``LlamaOptions`` with a ``window`` in all layers, or in none (``sliding_window: null``)."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    keys = (
        *llama_keys("attention_bias", "mlp_bias", intermediate_size=14336, max_position_embeddings=131072),
        Key("sliding_window", "window"),
    )
    fixed = {**Llama.fixed, "bias": False}
    derived = ("attention_pattern",)

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        defaults = {"sliding_window": 4096, "num_key_value_heads": 8}
        return super().to_spec({**defaults, **config}, overrides, problems)


@HF_FAMILIES.register("gpt2")
class GPT2(Family):
    """GPT-2: ``GPTOptions`` with learned positions, layer norms and biases. Its linears are stored ``[in, out]``."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    ours = ("GPT",)
    keys = (
        Key("n_layer", "num_layers", 12),
        Key("n_embd", "hidden_size", 768),
        Key("n_head", "num_heads", 12),
        Key("n_inner", "ffn_hidden_size"),
        Key("n_positions", "seq_len", 1024),
        Key("vocab_size", "vocab_size", 50257),
        # gelu_pytorch_tanh computes what gelu_new writes out
        Key(
            "activation_function",
            "mlp",
            "gelu_new",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("resid_pdrop", "dropout", 0.1),
        Key("embd_pdrop", "dropout", 0.1),
        Key("attn_pdrop", "attention_dropout", 0.1),
        Key("tie_word_embeddings", "tie_embeddings", True),
    )
    required = dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    fixed = dict(positions="learned", norm="layernorm", bias=True)
    derived = ("num_kv_heads", "head_dim")
    #: older versions saved their causal masks
    ignored = ("*h.*.attn.bias", "*h.*.attn.masked_bias")

    def rows(self, options: Any) -> Sequence[Row]:
        hidden, wide, vocabulary = options.hidden_size, options.ffn_hidden_size, options.vocab_size
        layer = "transformer.h.*"
        fused = [f"blocks.*.attention.qkv.{name}" for name in ("query", "key", "value")]
        return [
            row("transformer.wte.weight", TABLE, vocabulary, hidden),
            row("transformer.wpe.weight", "positions.weight", options.seq_len, hidden),
            *module(f"{layer}.ln_1", "blocks.*.attention_norm", hidden),
            *module(f"{layer}.attn.c_attn", fused, hidden, hidden, transposed=True),
            *module(f"{layer}.attn.c_proj", "blocks.*.attention.out", hidden, hidden, transposed=True),
            *module(f"{layer}.ln_2", "blocks.*.mlp_norm", hidden),
            *module(f"{layer}.mlp.c_fc", "blocks.*.mlp.up", wide, hidden, transposed=True),
            *module(f"{layer}.mlp.c_proj", "blocks.*.mlp.down", hidden, wide, transposed=True),
            *module("transformer.ln_f", "norm", hidden),
            row("lm_head.weight", HEAD, vocabulary, hidden),
        ]


@HF_FAMILIES.register("vit")
class ViT(Family):
    """The vision transformer: ``ViTOptions`` with a class token, layer norms and biases."""

    model_type = "vit"
    architecture = "ViTForImageClassification"
    prefix = "vit."
    ours = ("ViT",)
    keys = (
        Key("num_hidden_layers", "num_layers", 12),
        Key("hidden_size", "hidden_size", 768),
        Key("num_attention_heads", "num_heads", 12),
        Key("intermediate_size", "ffn_hidden_size", 3072),
        Key("hidden_act", "mlp", "gelu", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}),
        Key("layer_norm_eps", "norm_eps", 1e-12),
        Key("hidden_dropout_prob", "dropout", 0.0),
        Key("attention_probs_dropout_prob", "attention_dropout", 0.0),
        Key("image_size", "image_size", 224),
        Key("patch_size", "patch_size", 16),
        Key("num_channels", "in_channels", 3),
        Key("num_labels", "num_classes", 2),
    )
    required = dict(qkv_bias=True)
    fixed = dict(pool="token", norm="layernorm", bias=True)
    derived = ("num_kv_heads", "head_dim")
    #: the base model has a pooler, the classifier does not
    ignored = ("*pooler.dense.weight", "*pooler.dense.bias")

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        """Return our model as a spec.

        transformers leaves out ``num_labels`` and writes the names of the classes, unless there are two without names.
        """
        names = config.get("id2label")
        if isinstance(names, Mapping) and names:
            config = {**config, "num_labels": len(names)}
        return super().to_spec(config, overrides, problems)

    def to_config(self, options: Any) -> dict[str, Any]:
        config = super().to_config(options)
        for key in ("image_size", "patch_size"):
            height, width = config[key]
            config[key] = height if height == width else [height, width]
        names = {str(number): f"LABEL_{number}" for number in range(config.pop("num_labels"))}
        return config | dict(id2label=names, label2id={name: int(number) for number, name in names.items()})

    def extra_config(self, options: Any, assets: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names of the classes where their number is still that of the model."""
        labels = assets.get(LABELS, {})
        return dict(labels) if len(labels.get("id2label", ())) == options.num_classes else {}

    def rows(self, options: Any) -> Sequence[Row]:
        hidden, wide, channels = options.hidden_size, options.ffn_hidden_size, options.in_channels
        places, pixels = options.num_tokens, channels * math.prod(options.patch_size)
        patches, kernel = "vit.embeddings.patch_embeddings.projection", (hidden, channels, *options.patch_size)
        layer = "vit.encoder.layer.*"
        return [
            row("vit.embeddings.cls_token", "class_token.weight", hidden, file_shape=(1, 1, hidden)),
            row(
                "vit.embeddings.position_embeddings",
                "positions.weight",
                places,
                hidden,
                file_shape=(1, places, hidden),
            ),
            row(f"{patches}.weight", "patches.weight", hidden, pixels, file_shape=kernel),
            row(f"{patches}.bias", "patches.bias", hidden),
            *module(f"{layer}.layernorm_before", "blocks.*.attention_norm", hidden),
            *module(f"{layer}.attention.attention.query", "blocks.*.attention.qkv.query", hidden, hidden),
            *module(f"{layer}.attention.attention.key", "blocks.*.attention.qkv.key", hidden, hidden),
            *module(f"{layer}.attention.attention.value", "blocks.*.attention.qkv.value", hidden, hidden),
            *module(f"{layer}.attention.output.dense", "blocks.*.attention.out", hidden, hidden),
            *module(f"{layer}.layernorm_after", "blocks.*.mlp_norm", hidden),
            *module(f"{layer}.intermediate.dense", "blocks.*.mlp.up", wide, hidden),
            *module(f"{layer}.output.dense", "blocks.*.mlp.down", hidden, wide),
            *module("vit.layernorm", "norm", hidden),
            # the base model has no classifier, so a run may begin with a new one
            *module("classifier", "head", options.num_classes, hidden, may_be_missing=True),
        ]
