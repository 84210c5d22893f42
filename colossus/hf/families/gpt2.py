"""GPT-2: ``GPTOptions`` with learned positions, layer norms and biases. Its linears are stored ``[in, out]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colossus.hf.family import HEAD, TABLE, Family, Key, Row, module, row
from colossus.registry import HF_FAMILIES


@HF_FAMILIES.register("gpt2")
class GPT2(Family):
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
    #: masks that older versions saved
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
