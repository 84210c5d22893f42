"""Decoders of text of transformers with mixtures of experts, or with latent attention."""

from __future__ import annotations

from typing import Any

from helpers.outside_models.batches import INNER, TOKENS, VOCAB, WIDTH
from helpers.outside_models.hugging_face import GROUPED, SIZES, causal

EXPERTS: dict[str, Any] = GROUPED | dict(num_experts_per_tok=2, experts_implementation="eager")
LATENT: dict[str, Any] = SIZES | dict(
    num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=6,
    moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
    n_group=1, topk_group=1, norm_topk_prob=True, experts_implementation="eager",
)  # fmt: skip

causal("Mixtral", "Mixtral", **EXPERTS, num_local_experts=4)
causal("Qwen2-MoE", "Qwen2Moe", **EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
causal("Qwen3-MoE", "Qwen3Moe", **EXPERTS, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True)
causal("OLMoE", "Olmoe", **SIZES, num_experts=4, num_experts_per_tok=2, experts_implementation="eager")
causal("gpt-oss", "GptOss", **EXPERTS, num_local_experts=4, sliding_window=4)
causal(
    "GLM-4-MoE",
    "Glm4Moe",
    **EXPERTS,
    n_routed_experts=4,
    n_shared_experts=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
causal(
    "ERNIE-4.5-MoE",
    "Ernie4_5_Moe",
    **EXPERTS,
    moe_num_experts=4,
    moe_intermediate_size=16,
    moe_num_shared_experts=1,
    moe_layer_start_index=1,
    moe_layer_end_index=1,
)
causal("Granite-MoE", "GraniteMoe", **SIZES, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
causal(
    "JetMoE", "JetMoe", hidden_size=WIDTH, num_hidden_layers=2, num_key_value_heads=2, kv_channels=6,
    intermediate_size=INNER, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCAB, use_cache=False,
    max_position_embeddings=2 * TOKENS,
)  # fmt: skip
causal("DeepSeek-V2", "DeepseekV2", **LATENT, topk_method="greedy")
causal("DeepSeek-V3", "DeepseekV3", **LATENT)
