"""The vision transformer with its classifier: ``ViTOptions`` with a class token, layer norms and biases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from colossus.checkpoint.assets import LABELS
from colossus.hf.family import Family, Key, Row, module, row
from colossus.registry import HF_FAMILIES

#: as transformers 5 calls the modules, and may write them
_NEW_NAMES = (
    ("vit.encoder.layer.", "vit.layers."),
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)


@HF_FAMILIES.register("vit")
class ViT(Family):
    model_type = "vit"
    architecture = "ViTForImageClassification"
    prefix = "vit."
    ours = ("ViT",)
    keys = (
        Key("num_hidden_layers", "num_layers", 12),
        Key("hidden_size", "hidden_size", 768),
        Key("num_attention_heads", "num_heads", 12),
        Key("intermediate_size", "ffn_hidden_size", 3072),
        Key("hidden_act", "mlp", "gelu", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}),
        Key("layer_norm_eps", "norm_eps", 1e-12),
        Key("hidden_dropout_prob", "dropout", 0.0),
        Key("attention_probs_dropout_prob", "attention_dropout", 0.0),
        Key("image_size", "image_size", 224),
        Key("patch_size", "patch_size", 16),
        Key("num_channels", "in_channels", 3),
        Key("num_labels", "num_classes", 2),
    )
    required = dict(qkv_bias=True)
    fixed = dict(pool="token", norm="layernorm", bias=True)
    derived = ("num_kv_heads", "head_dim")
    #: of the base model, which the classifier does without
    ignored = ("*pooler.dense.weight", "*pooler.dense.bias")

    def to_spec(self, config: Mapping[str, Any], given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        """transformers writes names of classes in place of their number, where they are not two without names."""
        names = config.get("id2label")
        if isinstance(names, Mapping) and names:
            config = {**config, "num_labels": len(names)}
        return super().to_spec(config, given, problems)

    def to_config(self, options: Any) -> dict[str, Any]:
        config = super().to_config(options)
        for key in ("image_size", "patch_size"):
            height, width = config[key]
            config[key] = height if height == width else [height, width]
        names = {str(number): f"LABEL_{number}" for number in range(config.pop("num_labels"))}
        return config | dict(id2label=names, label2id={name: int(number) for number, name in names.items()})

    def beside(self, options: Any, assets: Mapping[str, Any]) -> dict[str, Any]:
        """Names of the classes, where there are still as many."""
        labels = assets.get(LABELS, {})
        return dict(labels) if len(labels.get("id2label", ())) == options.num_classes else {}

    def rows(self, options: Any) -> Sequence[Row]:
        hidden, wide, channels = options.hidden_size, options.ffn_hidden_size, options.in_channels
        places, pixels = options.num_tokens, channels * math.prod(options.patch_size)
        patches, kernel = "vit.embeddings.patch_embeddings.projection", (hidden, channels, *options.patch_size)
        layer = "vit.encoder.layer.*"
        rows = [
            row("vit.embeddings.cls_token", "class_token.weight", hidden, file_shape=(1, 1, hidden)),
            row(
                "vit.embeddings.position_embeddings",
                "positions.weight",
                places,
                hidden,
                file_shape=(1, places, hidden),
            ),
            row(f"{patches}.weight", "patches.weight", hidden, pixels, file_shape=kernel),
            row(f"{patches}.bias", "patches.bias", hidden),
            *module(f"{layer}.layernorm_before", "blocks.*.attention_norm", hidden),
            *module(f"{layer}.attention.attention.query", "blocks.*.attention.qkv.query", hidden, hidden),
            *module(f"{layer}.attention.attention.key", "blocks.*.attention.qkv.key", hidden, hidden),
            *module(f"{layer}.attention.attention.value", "blocks.*.attention.qkv.value", hidden, hidden),
            *module(f"{layer}.attention.output.dense", "blocks.*.attention.out", hidden, hidden),
            *module(f"{layer}.layernorm_after", "blocks.*.mlp_norm", hidden),
            *module(f"{layer}.intermediate.dense", "blocks.*.mlp.up", wide, hidden),
            *module(f"{layer}.output.dense", "blocks.*.mlp.down", hidden, wide),
            *module("vit.layernorm", "norm", hidden),
            # which the base model does not have, and a run may begin with a new one
            *module("classifier", "head", options.num_classes, hidden, may_be_missing=True),
        ]
        return [replace(each, other_names=_new_names(each.name)) for each in rows]


def _new_names(name: str) -> tuple[str, ...]:
    new = name
    for old, other in _NEW_NAMES:
        new = new.replace(old, other)
    return (new, new.removeprefix("vit.")) if new != name else ()
