"""The vision transformer: its sizes, what becomes of its tokens under each plan, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.training import assert_same_numbers, assert_same_run, config_of, run_cases, run_plan
from torch import Tensor

import colossus
from colossus.config import load_config
from colossus.models.vit import ViT

#: 8 patches and the class token, which 2 and 4 ranks do not divide
SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=24, num_heads=12, image_size=(8, 6), patch_size=(2, 3), in_channels=3, num_classes=5
)
# -- in training ----------------------------------------------------------------------------------------------

TRAINED: dict[str, Any] = dict(type="ViT", **SIZES)


@pytest.mark.long
def test_padded_tokens_under_recomputation_and_dropout() -> None:
    """The mask of padding goes into blocks that are recomputed; their dropout is the same again."""
    sharded = dict(tensor=dict(size=2, sequence_sharded=True))
    dropped = dict(dropout=0.2, attention_dropout=0.1)
    kinds = [(kind, more) for kind in ("none", "full", "selective") for more in ({}, dropped)]
    configs = {
        f"{kind} {bool(more)}": config_of(sharded, 2, "fp64", model={**TRAINED, **more, "activation_checkpoint": kind})
        for kind, more in kinds
    }
    found = run_cases(2, configs, 2)
    for name, more in (("none False", {}), ("none True", dropped)):
        assert_same_numbers(found[name][0], run_plan(1, config_of({}, 2, "fp64", model={**TRAINED, **more}), 2)[0])
    assert found["none True"][0].losses != found["none False"][0].losses
    for name, traces in found.items():
        reference = found[f"none {name.split()[1]}"][0]
        for trace in traces:
            assert_same_run(trace, reference, loss=1e-12, norm=1e-12, parameter=1e-10)


# -- what is refused ------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (dict(sequence=2), {}, "parallel.sequence.size = 2: no tokens that could be split"),
    ({}, dict(image_size=9), r"image_size: height = 9 is not a multiple of model.patch_size: height = 2; .* 8 or 10"),
    (dict(pipeline=5), {}, r"4 blocks \(layers and both ends\), fewer than parallel.pipeline.size = 5"),
]


@pytest.mark.parametrize(("parallel", "more", "words"), REFUSED)
def test_what_is_refused_before_launch(parallel: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(dict(parallel=parallel, model={**TRAINED, **more}))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(2, 3, 6, 8), r"\[2, 3, 6, 8\], has shape \[3, 6, 8\], but .* say \[3, 8, 6\]"),
        (torch.zeros(2, 3, 8, 6, dtype=torch.uint8), "its input is torch.uint8; it takes floating-point images"),
    ],
)
def test_images_that_are_refused(images: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        colossus.build(lambda: ViT(**SIZES))(images)
