"""Decoders of text of transformers, with a dense MLP."""

from __future__ import annotations

from functools import partial

from helpers.outside_models.batches import HEADS, INNER, TOKENS, VOCAB, WIDTH, tokens
from helpers.outside_models.hugging_face import GROUPED, SIZES, causal, transformer
from helpers.outside_models.rows import text

gpt2 = partial(
    transformer, "GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=TOKENS,
    vocab_size=VOCAB, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
text("GPT-2", gpt2, tokens)
causal(
    "GPT-J", "GPTJ", n_embd=32, n_layer=2, n_head=HEADS, n_positions=2 * TOKENS, rotary_dim=4, vocab_size=VOCAB,
    n_inner=INNER, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
causal(
    "GPT-Neo", "GPTNeo", hidden_size=WIDTH, num_layers=2, num_heads=HEADS, attention_types=[[["global", "local"], 1]],
    window_size=4, intermediate_size=INNER, vocab_size=VOCAB, max_position_embeddings=2 * TOKENS, use_cache=False,
    bos_token_id=1, eos_token_id=2, resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
causal(
    "GPT-NeoX", "GPTNeoX", **SIZES | dict(hidden_size=32),
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75),
)  # fmt: skip
causal(
    "GPT-BigCode", "GPTBigCode", n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=2 * TOKENS, vocab_size=VOCAB,
    multi_query=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
causal(
    "OPT", "OPT", hidden_size=WIDTH, ffn_dim=INNER, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=VOCAB,
    max_position_embeddings=2 * TOKENS, dropout=0.0, attention_dropout=0.0, layerdrop=0.0, use_cache=False,
    word_embed_proj_dim=WIDTH, pad_token_id=1,
)  # fmt: skip
causal(
    "BLOOM", "Bloom", hidden_size=WIDTH, n_layer=2, n_head=HEADS, vocab_size=VOCAB, use_cache=False,
    hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
causal(
    "Falcon", "Falcon", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=VOCAB,
    num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=INNER, use_cache=False, alibi=False,
    hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
causal(
    "MPT", "Mpt", d_model=WIDTH, n_heads=HEADS, n_layers=2, expansion_ratio=2, max_seq_len=TOKENS, vocab_size=VOCAB,
    resid_pdrop=0.0, emb_pdrop=0.0, use_cache=False,
)  # fmt: skip
causal("Llama", "Llama", **GROUPED)
causal("Mistral", "Mistral", **GROUPED, sliding_window=4)
causal("Qwen2", "Qwen2", **GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1)
causal("Qwen3", "Qwen3", **GROUPED, tie_word_embeddings=True)
causal("Gemma", "Gemma", **GROUPED, tie_word_embeddings=True)
causal("Gemma 2", "Gemma2", **GROUPED, sliding_window=4, query_pre_attn_scalar=6, tie_word_embeddings=True)
gemma3 = partial(
    transformer, "Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, sliding_window=4, query_pre_attn_scalar=6,
    layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True,
)  # fmt: skip
text("Gemma 3", gemma3, tokens)
causal("Phi", "Phi", **SIZES | dict(hidden_size=32), partial_rotary_factor=0.5)
causal("Phi-3", "Phi3", **SIZES | dict(num_key_value_heads=2))
causal(
    "StableLM",
    "StableLm",
    **SIZES | dict(hidden_size=32, num_key_value_heads=4),
    partial_rotary_factor=0.5,
    use_qkv_bias=True,
)
causal("OLMo", "Olmo", **SIZES, clip_qkv=4.0)
causal("OLMo 2", "Olmo2", **SIZES)
causal("Granite", "Granite", **SIZES | dict(num_key_value_heads=2), residual_multiplier=0.5, logits_scaling=2.0)
causal("Cohere", "Cohere", **SIZES | dict(num_key_value_heads=2), use_qk_norm=True)
causal("StarCoder2", "Starcoder2", **SIZES | dict(num_key_value_heads=2), residual_dropout=0.0, embedding_dropout=0.0)
causal("SmolLM3", "SmolLM3", **SIZES | dict(num_key_value_heads=2), no_rope_layers=[1, 0])
causal("GLM-4", "Glm4", **GROUPED, partial_rotary_factor=0.5)
causal("Nemotron", "Nemotron", **SIZES | dict(num_key_value_heads=2), partial_rotary_factor=1.0)
causal("EXAONE 4", "Exaone4", **GROUPED, sliding_window=4)
