"""Llama 1 to 3: ``LlamaOptions``, or a ``GPT`` with the same options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colossus.hf.family import Family, HFTensor, Part, unlike
from colossus.hf.rope import read_rope, write_rope
from colossus.hf.settings import Settings
from colossus.registry import HF_FAMILIES


@HF_FAMILIES.register("llama")
class Llama(Family):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    ours = ("Llama", "GPT")
    #: what older versions saved of the rotary positions
    ignored = ("*rotary_emb.inv_freq",)

    def to_spec(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        s = settings
        s.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        hidden, heads = s.count("hidden_size", 4096), s.count("num_attention_heads", 32)
        bias = s.flag("attention_bias", False)
        if s.flag("mlp_bias", False) != bias:
            s.problems.append(
                f"attention_bias = {bias}, mlp_bias = {not bias}: colossus has biases in all linears of a block, or in "
                f"none"
            )
        return dict(
            type="Llama",
            num_layers=s.count("num_hidden_layers", 32),
            hidden_size=hidden,
            num_heads=heads,
            head_dim=s.count("head_dim", hidden // heads or 1),
            num_kv_heads=s.count("num_key_value_heads", heads),
            vocab_size=s.count("vocab_size", 32000),
            seq_len=s.count("max_position_embeddings", 2048),
            ffn_hidden_size=s.count("intermediate_size", 11008),
            norm_eps=s.number("rms_norm_eps", 1e-6),
            bias=bias,
            tie_embeddings=s.flag("tie_word_embeddings", False),
            attention_dropout=s.number("attention_dropout", 0.0, below=1),
            **read_rope(s),
        )

    def differences(self, options: Any) -> list[str]:
        found = unlike(options, norm="rmsnorm", mlp="swiglu")
        return found if options.is_rotary else ["positions = 'learned' (not 'rotary')", *found]

    def to_config(self, options: Any) -> dict[str, Any]:
        o = options
        return dict(
            vocab_size=o.vocab_size,
            max_position_embeddings=o.seq_len,
            hidden_size=o.hidden_size,
            intermediate_size=o.ffn_hidden_size,
            num_hidden_layers=o.num_layers,
            num_attention_heads=o.num_heads,
            num_key_value_heads=o.num_kv_heads,
            head_dim=o.head_dim,
            hidden_act="silu",
            rms_norm_eps=o.norm_eps,
            attention_bias=o.bias,
            mlp_bias=o.bias,
            attention_dropout=o.attention_dropout,
            tie_word_embeddings=o.tie_embeddings,
            **write_rope(o),
        )

    def tensors(self, options: Any) -> Sequence[HFTensor]:
        return list(self._tensors(options))

    def _tensors(self, options: Any) -> Iterator[HFTensor]:
        o = options
        hidden, wide = o.hidden_size, o.ffn_hidden_size
        queries, keys = o.num_heads * o.head_dim, o.num_kv_heads * o.head_dim
        tied = ("lm_head.weight",) if o.tie_embeddings else ()
        yield _tensor("model.embed_tokens.weight", "embedding.weight", o.vocab_size, hidden, other_names=tied)
        for number in range(o.num_layers):
            there, here = f"model.layers.{number}", f"blocks.{number}"
            yield _tensor(f"{there}.input_layernorm.weight", f"{here}.attention_norm.weight", hidden)
            for theirs, ours, out, inputs in (
                ("self_attn.q_proj", "attention.qkv.query", queries, hidden),
                ("self_attn.k_proj", "attention.qkv.key", keys, hidden),
                ("self_attn.v_proj", "attention.qkv.value", keys, hidden),
                ("self_attn.o_proj", "attention.out", hidden, queries),
                ("mlp.gate_proj", "mlp.up.gate", wide, hidden),
                ("mlp.up_proj", "mlp.up.value", wide, hidden),
                ("mlp.down_proj", "mlp.down", hidden, wide),
            ):
                yield _tensor(f"{there}.{theirs}.weight", f"{here}.{ours}.weight", out, inputs)
                if o.bias:
                    yield _tensor(f"{there}.{theirs}.bias", f"{here}.{ours}.bias", out)
            yield _tensor(f"{there}.post_attention_layernorm.weight", f"{here}.mlp_norm.weight", hidden)
        yield _tensor("model.norm.weight", "norm.weight", hidden)
        if not o.tie_embeddings:
            yield _tensor("lm_head.weight", "head.weight", o.vocab_size, hidden)

    def aliases(self, options: Any) -> dict[str, str]:
        return {"head.weight": "embedding.weight"} if options.tie_embeddings else {}


def _tensor(there: str, here: str, *shape: int, other_names: tuple[str, ...] = ()) -> HFTensor:
    return HFTensor(there, shape, (Part(here, shape),), other_names=other_names)
