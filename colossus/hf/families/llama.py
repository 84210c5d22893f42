"""Llama 1 to 3: ``LlamaOptions``, or a ``GPT`` with the same options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colossus.hf.family import HEAD, TABLE, Family, Key, Row, module, row
from colossus.hf.rope import read_rope, write_rope
from colossus.registry import HF_FAMILIES


@HF_FAMILIES.register("llama")
class Llama(Family):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    ours = ("Llama", "GPT")
    keys = (
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
    fixed = dict(positions="rotary", norm="rmsnorm")
    #: what older versions saved of the rotary positions
    ignored = ("*rotary_emb.inv_freq",)

    def to_spec(self, config: Mapping[str, Any], given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        return super().to_spec(config, given, problems) | read_rope(config, problems)

    def to_config(self, options: Any) -> dict[str, Any]:
        return super().to_config(options) | write_rope(options)

    def rows(self, options: Any) -> Sequence[Row]:
        hidden, wide, vocabulary = options.hidden_size, options.ffn_hidden_size, options.vocab_size
        queries, keys = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        linears = (
            ("self_attn.q_proj", "attention.qkv.query", queries, hidden),
            ("self_attn.k_proj", "attention.qkv.key", keys, hidden),
            ("self_attn.v_proj", "attention.qkv.value", keys, hidden),
            ("self_attn.o_proj", "attention.out", hidden, queries),
            ("mlp.gate_proj", "mlp.up.gate", wide, hidden),
            ("mlp.up_proj", "mlp.up.value", wide, hidden),
            ("mlp.down_proj", "mlp.down", hidden, wide),
        )
        return [
            row("model.embed_tokens.weight", TABLE, vocabulary, hidden),
            row("model.layers.*.input_layernorm.weight", "blocks.*.attention_norm.weight", hidden),
            *(
                each
                for theirs, ours, *shape in linears
                for each in module(f"model.layers.*.{theirs}", f"blocks.*.{ours}", *shape, bias=options.bias)
            ),
            row("model.layers.*.post_attention_layernorm.weight", "blocks.*.mlp_norm.weight", hidden),
            row("model.norm.weight", "norm.weight", hidden),
            row("lm_head.weight", HEAD, vocabulary, hidden),
        ]
