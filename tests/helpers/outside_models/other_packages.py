"""Models of timm and x-transformers."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from helpers.outside_models.batches import CLASSES, HEADS, TOKENS, VOCAB, WIDTH, images, tokens
from helpers.outside_models.rows import outside
from helpers.user_models.cases import Batch
from torch import nn


def _timm() -> ModuleType:
    """timm imports torchvision for its data sets, and torch for CPUs has none on every index: here a stand-in, which
    is gone again before transformers asks whether there is one."""
    names = (
        "", ".transforms", ".transforms.functional", ".transforms.v2", ".ops", ".ops.misc", ".datasets", ".models",
        ".models.feature_extraction",
    )  # fmt: skip
    stand_ins = [] if "timm.models" in sys.modules else [f"torchvision{name}" for name in names]
    for name in stand_ins:
        sys.modules[name] = MagicMock(__spec__=None, __path__=[])
    import timm.models

    for name in stand_ins:
        del sys.modules[name]
    return timm.models


def _of_timm(model: str, **options: Any) -> nn.Module:
    made: nn.Module = getattr(_timm(), model)(num_classes=CLASSES, **options)
    return made


def _regnet() -> nn.Module:
    models = _timm().regnet
    sizes = models.RegNetCfg(depth=6, w0=8, wa=8.0, wm=2.0, group_size=8, se_ratio=0.25)
    made: nn.Module = models.RegNet(sizes, num_classes=CLASSES, zero_init_last=False)
    return made


def _efficientnet() -> nn.Module:
    models = _timm().efficientnet
    blocks = models.decode_arch_def([["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r2_k3_s2_e2_c8_se0.25"]])
    made: nn.Module = models.EfficientNet(blocks, num_classes=CLASSES, num_features=16, stem_size=8)
    return made


def _pictures(name: str, model: str, height: int, width: int, **options: Any) -> None:
    more = {key: options.pop(key) for key in ("refused",) if key in options}
    build = partial(_of_timm, model, **options)
    outside(f"timm {name}", build, images(height, width), example=True, **more)


_VIT: dict[str, Any] = dict(img_size=(16, 8), patch_size=4, embed_dim=WIDTH, depth=2, num_heads=HEADS)
if find_spec("timm") is not None:
    _pictures("ViT", "VisionTransformer", 16, 8, **_VIT, mlp_ratio=2)
    _pictures(
        "EVA",
        "Eva",
        16,
        16,
        **_VIT | dict(img_size=16, embed_dim=32),
        mlp_ratio=2,
        use_rot_pos_emb=True,
        swiglu_mlp=True,
        qkv_fused=False,
    )
    _pictures("BEiT", "Beit", 16, 8, **_VIT, mlp_ratio=2, use_rel_pos_bias=True, init_values=0.1)
    _pictures(
        "MLP-Mixer", "MlpMixer", 16, 8, img_size=(16, 8), patch_size=4, embed_dim=WIDTH, num_blocks=2,
        mlp_ratio=(1.0, 2.0),
    )  # fmt: skip
    _pictures("ConvNeXt", "ConvNeXt", 32, 32, depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), ls_init_value=0.5)
    _pictures(
        "Swin", "SwinTransformer", 32, 32, img_size=32, patch_size=4, window_size=4, embed_dim=8, depths=(2, 2),
        num_heads=(2, 4), mlp_ratio=2.0, drop_path_rate=0.0,
    )  # fmt: skip
    outside("timm RegNet", _regnet, images(32, 32), example=True, has_batch_norm=True)
    outside("timm EfficientNet", _efficientnet, images(32, 32), example=True, has_batch_norm=True)


def _ids(step: int) -> Batch:
    """The tokens as the one input that x-transformers and own models take."""
    batch = tokens(step)
    return batch | {"inputs": batch["inputs"]["input_ids"]}


def _x_transformer(layers: str, **options: Any) -> nn.Module:
    import x_transformers

    made = getattr(x_transformers, layers)(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=6, **options)
    return x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=TOKENS, attn_layers=made)


_x = partial(partial, _x_transformer)
outside("x-transformers decoder", _x("Decoder", rotary_pos_emb=False), _ids, example=True)
outside("x-transformers encoder", _x("Encoder", use_rmsnorm=True, ff_glu=True), _ids, example=True)
outside(
    "x-transformers grouped rotary decoder", _x("Decoder", rotary_pos_emb=True, attn_kv_heads=2), _ids,
    example=True,
)  # fmt: skip
