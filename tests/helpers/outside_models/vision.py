"""Models of pictures of transformers."""

from __future__ import annotations

from typing import Any

from helpers.outside_models.batches import CLASSES, HEADS, INNER, WIDTH, both, distances, images, vectors
from helpers.outside_models.hugging_face import NO_DROPOUT, maker
from helpers.outside_models.rows import outside

_VIT: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS, image_size=[16, 8],
    patch_size=4, **NO_DROPOUT,
)  # fmt: skip
_SMALL, _SQUARE = images(16, 8), images(32, 32)


def _classifier(name: str, family: str, batch: Any = _SMALL, **options: Any) -> None:
    more = {key: options.pop(key) for key in ("refused", "example", "has_batch_norm") if key in options}
    outside(name, maker(family, "ForImageClassification", num_labels=CLASSES, **options), batch, **more)


_classifier("ViT", "ViT", **_VIT)
_classifier("DeiT", "DeiT", **_VIT)
_classifier("BEiT", "Beit", **_VIT, use_relative_position_bias=True, layer_scale_init_value=0.1, drop_path_rate=0.0)
_classifier(
    "DINOv2",
    "Dinov2",
    images(16, 16),
    **_VIT | dict(image_size=16),
    mlp_ratio=2,
    drop_path_rate=0.0,
    layerscale_value=0.5,
)
_classifier(
    "Swin", "Swin", _SQUARE, image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4,
    mlp_ratio=2.0, drop_path_rate=0.0, **NO_DROPOUT,
)  # fmt: skip
_classifier(
    "Swin 2", "Swinv2", _SQUARE, image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4],
    window_size=4, mlp_ratio=2.0, drop_path_rate=0.0, **NO_DROPOUT,
)  # fmt: skip
_classifier(
    "ConvNeXt", "ConvNext", _SQUARE, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=4,
    drop_path_rate=0.0, image_size=32, layer_scale_init_value=0.5,
)  # fmt: skip
_classifier(
    "ResNet", "ResNet", _SQUARE, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic",
    has_batch_norm=True,
)  # fmt: skip
_classifier(
    "RegNet", "RegNet", _SQUARE, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=8,
    has_batch_norm=True,
)  # fmt: skip
_classifier(
    "PoolFormer", "PoolFormer", _SQUARE, hidden_sizes=[8, 16], depths=[2, 2], num_encoder_blocks=2, patch_sizes=[7, 3],
    strides=[4, 2], padding=[2, 1], drop_path_rate=0.0,
)  # fmt: skip
_SEGFORMER = dict(
    num_encoder_blocks=2, depths=[1, 2], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
    num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=CLASSES, drop_path_rate=0.0,
    classifier_dropout_prob=0.0, **NO_DROPOUT,
)  # fmt: skip
outside(
    "SegFormer", maker("Segformer", "ForSemanticSegmentation", **_SEGFORMER), _SQUARE, loss=distances("logits"),
    has_batch_norm=True, example=True,
)  # fmt: skip
outside(
    "DPT", maker(
        "DPT", "ForDepthEstimation", **_VIT | dict(image_size=16, num_hidden_layers=4), is_hybrid=False,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5], initializer_range=0.2,
    ), images(16, 16), loss=distances("predicted_depth"), example=True,
)  # fmt: skip
_classifier("ViT with all hidden states", "ViT", **_VIT, output_hidden_states=True)


def _masks(step: int) -> dict[str, Any]:
    """Pictures, and the numbers that say which of their patches are hidden."""
    return both(vectors("noise", 16), images(16, 16, "pixel_values"))(step)


mae = maker(
    "ViTMAE", "ForPreTraining", **_VIT | dict(image_size=16), decoder_hidden_size=16, decoder_intermediate_size=24,
    decoder_num_hidden_layers=2, decoder_num_attention_heads=4, mask_ratio=0.5,
)  # fmt: skip
outside("MAE", mae, _masks, loss=distances("logits"), example=True)
