"""Encoders of text of transformers."""

from __future__ import annotations

from typing import Any

from helpers.outside_models.batches import HEADS, INNER, TOKENS, VOCAB, WIDTH, tokens
from helpers.outside_models.hugging_face import NO_DROPOUT, SIZES, maker
from helpers.outside_models.rows import text


def _masked(name: str, family: str, **options: Any) -> None:
    more = {key: options.pop(key) for key in ("refused", "refused_padded") if key in options}
    text(name, maker(family, "ForMaskedLM", **options), tokens, **more)


_BERT = SIZES | NO_DROPOUT
_ROBERTA = _BERT | dict(max_position_embeddings=3 * TOKENS, pad_token_id=1)

_masked("BERT", "Bert", **_BERT)
_masked("RoBERTa", "Roberta", **_ROBERTA)
_masked("XLM-RoBERTa", "XLMRoberta", **_ROBERTA)
_masked("ALBERT", "Albert", **_BERT, embedding_size=8)
_masked("ELECTRA", "Electra", **_BERT, embedding_size=8)
_masked(
    "DeBERTa", "DebertaV2", **_BERT, relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"],
    share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False, pooler_dropout=0.0,
)  # fmt: skip
_masked(
    "MobileBERT",
    "MobileBert",
    **_BERT,
    initializer_range=0.2,
    embedding_size=8,
    intra_bottleneck_size=16,
    num_feedforward_networks=2,
)
_masked(
    "ModernBERT", "ModernBert", **SIZES, local_attention=4, global_attn_every_n_layers=2, attention_dropout=0.0,
    embedding_dropout=0.0, mlp_dropout=0.0, cls_token_id=3, sep_token_id=4, attn_implementation="sdpa",
)  # fmt: skip
_masked(
    "DistilBERT", "DistilBert", dim=WIDTH, hidden_dim=INNER, n_layers=2, n_heads=HEADS, vocab_size=VOCAB,
    max_position_embeddings=2 * TOKENS, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
_masked("MPNet", "MPNet", **_ROBERTA)
_masked("ESM", "Esm", **_ROBERTA, position_embedding_type="rotary", mask_token_id=5, token_dropout=False)
_masked("RoFormer", "RoFormer", **_BERT, embedding_size=8)
_masked("FNet", "FNet", **_BERT)
