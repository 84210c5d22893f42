"""The vision transformer with its classifier: ``ViTOptions`` with a class token, layer norms and biases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colossus.checkpoint.companions import LABELS
from colossus.hf.family import Family, HFTensor, Part, unlike
from colossus.hf.settings import Settings
from colossus.registry import HF_FAMILIES

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_WRITTEN = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
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
    is_language_model = False
    #: of the base model, which the classifier does without
    ignored = ("*pooler.dense.weight", "*pooler.dense.bias")

    def to_spec(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        s = settings
        s.require("qkv_bias", True, True, "biases in all linears, or in none")
        return dict(
            type="ViT",
            num_layers=s.count("num_hidden_layers", 12),
            hidden_size=s.count("hidden_size", 768),
            num_heads=s.count("num_attention_heads", 12),
            mlp=s.choice("hidden_act", "gelu", _ACTIVATIONS),
            ffn_hidden_size=s.count("intermediate_size", 3072),
            norm="layernorm",
            norm_eps=s.number("layer_norm_eps", 1e-12),
            bias=True,
            dropout=s.number("hidden_dropout_prob", 0.0, below=1),
            attention_dropout=s.number("attention_probs_dropout_prob", 0.0, below=1),
            image_size=_sides(s, "image_size", 224),
            patch_size=_sides(s, "patch_size", 16),
            in_channels=s.count("num_channels", 3),
            num_classes=_num_classes(s),
            pool="token",
        )

    def differences(self, options: Any) -> list[str]:
        o = options
        found = unlike(o, pool="token", norm="layernorm", bias=True, num_kv_heads=o.num_heads)
        found += unlike(o, head_dim=o.hidden_size // o.num_heads)
        return found + ([] if o.mlp in _WRITTEN else [f"mlp = {o.mlp!r} (not 'gelu' or 'gelu_tanh')"])

    def to_config(self, options: Any) -> dict[str, Any]:
        o = options
        return dict(
            image_size=_side(o.image_size),
            patch_size=_side(o.patch_size),
            num_channels=o.in_channels,
            hidden_size=o.hidden_size,
            intermediate_size=o.ffn_hidden_size,
            num_hidden_layers=o.num_layers,
            num_attention_heads=o.num_heads,
            hidden_act=_WRITTEN[o.mlp],
            layer_norm_eps=o.norm_eps,
            qkv_bias=True,
            hidden_dropout_prob=o.dropout,
            attention_probs_dropout_prob=o.attention_dropout,
            **_numbered(o.num_classes),
        )

    def beside(self, options: Any, told: Mapping[str, Any]) -> dict[str, Any]:
        """Names of the classes, where there are still as many."""
        labels = told.get(LABELS, {})
        return dict(labels) if len(labels.get("id2label", ())) == options.num_classes else {}

    def tensors(self, options: Any) -> Sequence[HFTensor]:
        return list(self._tensors(options))

    def _tensors(self, options: Any) -> Iterator[HFTensor]:
        o = options
        hidden, wide, pixels = o.hidden_size, o.ffn_hidden_size, o.in_channels * math.prod(o.patch_size)
        there = "vit.embeddings"
        yield HFTensor(f"{there}.cls_token", (1, 1, hidden), (Part("class_token.weight", (hidden,)),))
        positions = Part("positions.weight", (o.num_tokens, hidden))
        yield HFTensor(f"{there}.position_embeddings", (1, *positions.shape), (positions,))
        patches, there = Part("patches.weight", (hidden, pixels)), f"{there}.patch_embeddings.projection"
        yield HFTensor(f"{there}.weight", (hidden, o.in_channels, *o.patch_size), (patches,))
        yield _tensor(f"{there}.bias", "patches.bias", hidden)
        for number in range(o.num_layers):
            for theirs, ours, *shape in (
                ("layernorm_before", "attention_norm", hidden),
                ("attention.attention.query", "attention.qkv.query", hidden, hidden),
                ("attention.attention.key", "attention.qkv.key", hidden, hidden),
                ("attention.attention.value", "attention.qkv.value", hidden, hidden),
                ("attention.output.dense", "attention.out", hidden, hidden),
                ("layernorm_after", "mlp_norm", hidden),
                ("intermediate.dense", "mlp.up", wide, hidden),
                ("output.dense", "mlp.down", hidden, wide),
            ):
                there, here = f"vit.encoder.layer.{number}.{theirs}", f"blocks.{number}.{ours}"
                yield _tensor(f"{there}.weight", f"{here}.weight", *shape)
                yield _tensor(f"{there}.bias", f"{here}.bias", shape[0])
        for there, here, *shape in (
            ("vit.layernorm", "norm", hidden),
            ("classifier", "head", o.num_classes, hidden),
        ):
            is_head = there == "classifier"  # which the base model does not have, and a run may begin with a new one
            yield _tensor(f"{there}.weight", f"{here}.weight", *shape, may_be_missing=is_head)
            yield _tensor(f"{there}.bias", f"{here}.bias", shape[0], may_be_missing=is_head)


def _tensor(there: str, here: str, *shape: int, may_be_missing: bool = False) -> HFTensor:
    new = there
    for old, name in _NEW_NAMES:
        new = new.replace(old, name)
    others = (new, new.removeprefix("vit.")) if new != there else ()
    return HFTensor(there, shape, (Part(here, shape),), other_names=others, may_be_missing=may_be_missing)


def _sides(settings: Settings, key: str, default: int) -> tuple[int, int]:
    value = settings.get(key, default)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        settings.problems.append(f"{key} = {value!r}: a whole number is needed, or [height, width]")
        return default, default
    return sides[0], sides[1]


def _numbered(num_classes: int) -> dict[str, Any]:
    labels = [f"LABEL_{number}" for number in range(num_classes)]
    return dict(id2label={str(n): each for n, each in enumerate(labels)}, label2id={e: n for n, e in enumerate(labels)})


def _side(sides: tuple[int, int]) -> int | list[int]:
    return sides[0] if sides[0] == sides[1] else list(sides)


def _num_classes(settings: Settings) -> int:
    """transformers writes the labels where they are not two without names."""
    labels = settings.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else settings.count("num_labels", 2)
