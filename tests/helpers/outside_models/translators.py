"""Encoders with decoders, of transformers."""

from __future__ import annotations

from typing import Any

from helpers.outside_models.batches import HEADS, INNER, TOKENS, VOCAB, WIDTH, both, tokens, translations, vectors
from helpers.outside_models.hugging_face import maker
from helpers.outside_models.rows import outside, text

_BART: dict[str, Any] = dict(
    d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
    encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, vocab_size=VOCAB, max_position_embeddings=2 * TOKENS, dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0, use_cache=False, decoder_start_token_id=2, pad_token_id=1,
)  # fmt: skip
_T5: dict[str, Any] = dict(
    d_model=WIDTH, d_kv=6, d_ff=INNER, num_layers=2, num_heads=HEADS, vocab_size=VOCAB, dropout_rate=0.0,
    use_cache=False, relative_attention_num_buckets=8, decoder_start_token_id=0,
)  # fmt: skip

text("T5", maker("T5", "ForConditionalGeneration", **_T5, feed_forward_proj="gated-gelu"), translations)
text("mT5", maker("MT5", "ForConditionalGeneration", **_T5), translations)
text("BART", maker("Bart", "ForConditionalGeneration", **_BART), translations)
text("Marian", maker("Marian", "MTModel", **_BART, forced_eos_token_id=0), translations)
text("Pegasus", maker("Pegasus", "ForConditionalGeneration", **_BART), translations)

_sounds = vectors("input_features", 8, 2 * TOKENS)
whisper = maker(
    "Whisper", "ForConditionalGeneration", **_BART | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2),
    num_mel_bins=8, max_source_positions=TOKENS, max_target_positions=TOKENS, suppress_tokens=None,
    begin_suppress_tokens=None,
)  # fmt: skip


def _transcripts(step: int) -> dict[str, Any]:
    batch = both(_sounds, tokens)(step)
    batch["inputs"]["decoder_input_ids"] = batch["inputs"].pop("input_ids")
    return batch


outside("Whisper", whisper, _transcripts, example=True)
