"""Models of speech and of time series, of transformers."""

from __future__ import annotations

from typing import Any

from helpers.outside_models.batches import CLASSES, HEADS, INNER, WIDTH, distances, vectors
from helpers.outside_models.hugging_face import maker
from helpers.outside_models.rows import outside

_WAVES: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=CLASSES,
    num_labels=CLASSES, conv_dim=[8, 8], conv_stride=[4, 2], conv_kernel=[4, 2], num_feat_extract_layers=2,
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
    activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
    classifier_proj_size=8,
)  # fmt: skip
_wave = vectors("input_values", 96)

outside(
    "wav2vec2", maker("Wav2Vec2", "ForSequenceClassification", **_WAVES, use_weighted_layer_sum=True), _wave,
    example=True,
)  # fmt: skip
outside(
    "WavLM", maker("WavLM", "ForSequenceClassification", **_WAVES, num_buckets=8, max_bucket_distance=16), _wave,
    example=True,
)  # fmt: skip
outside("HuBERT", maker("Hubert", "ForSequenceClassification", **_WAVES), _wave, example=True)
outside(
    "AST", maker(
        "AST", "ForAudioClassification", hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=HEADS, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ), vectors("input_values", 16, 8), example=True,
)  # fmt: skip

_SERIES: dict[str, Any] = dict(
    num_input_channels=3, context_length=16, patch_length=4, patch_stride=4, d_model=WIDTH, num_hidden_layers=2,
    num_attention_heads=HEADS, ffn_dim=INNER, prediction_length=4, scaling=None, dropout=0.0, attention_dropout=0.0,
    positional_dropout=0.0, path_dropout=0.0, ff_dropout=0.0, head_dropout=0.0, loss="mse",
)  # fmt: skip
_past = vectors("past_values", 16, 3)
for _norm in ("batchnorm", "layernorm"):
    outside(
        f"PatchTST, {_norm}", maker("PatchTST", "ForPrediction", **_SERIES, norm_type=_norm), _past,
        loss=distances("prediction_outputs"), example=True,
        has_batch_norm=_norm == "batchnorm",
    )  # fmt: skip
outside(
    "PatchTSMixer", maker(
        "PatchTSMixer", "ForPrediction", num_input_channels=3, context_length=16, patch_length=4, patch_stride=4,
        d_model=WIDTH, num_layers=2, prediction_length=4, scaling=None, dropout=0.0, head_dropout=0.0, loss="mse",
    ), _past, loss=distances("prediction_outputs"), example=True,
)  # fmt: skip
