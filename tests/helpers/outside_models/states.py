"""Models of text of transformers that carry a state along tokens: state spaces and linear attention."""

from __future__ import annotations

from helpers.outside_models.batches import INNER, VOCAB, WIDTH, tokens
from helpers.outside_models.hugging_face import GROUPED, causal, maker
from helpers.outside_models.rows import outside

causal(
    "Mamba", "Mamba", hidden_size=WIDTH, state_size=4, num_hidden_layers=2, vocab_size=VOCAB, conv_kernel=3,
    time_step_rank=4, use_cache=False, pad_token_id=0, use_mambapy=False,
)  # fmt: skip
causal(
    "Mamba 2", "Mamba2", hidden_size=WIDTH, state_size=8, num_hidden_layers=2, vocab_size=VOCAB, conv_kernel=3,
    num_heads=8, head_dim=6, n_groups=2, chunk_size=4, use_cache=False, pad_token_id=0,
)  # fmt: skip
causal(
    "Jamba", "Jamba", **{**GROUPED, "intermediate_size": INNER}, num_experts=4, num_experts_per_tok=2,
    attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4,
    mamba_d_conv=3, mamba_dt_rank=4, use_mamba_kernels=False, experts_implementation="eager",
)  # fmt: skip
rwkv = maker(
    "Rwkv", "ForCausalLM", hidden_size=WIDTH, attention_hidden_size=WIDTH, intermediate_size=INNER,
    num_hidden_layers=2, vocab_size=VOCAB, context_length=16, use_cache=False,
)  # fmt: skip
outside("RWKV", rwkv, tokens)
