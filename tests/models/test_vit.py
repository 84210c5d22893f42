"""The vision transformer: its sizes, what becomes of its tokens under each plan, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modes import BATCH, MODES, own
from helpers.training import assert_same_numbers, assert_same_run, config_of, run_cases, run_plan
from helpers.twins import PlainViT
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.config import load_config
from colossus.context.parallel_context import ParallelContext
from colossus.models.vit import ViT

#: 8 patches and the class token, which 2 and 4 ranks do not divide
SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=24, num_heads=12, image_size=(8, 6), patch_size=(2, 3), in_channels=3, num_classes=5
)
IMAGES = torch.randn(BATCH, 3, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Mixes(nn.Module):
    """A user's own block, which would see padding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = layers.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == (9, 24)
        return x + self.linear(x.mean(1, keepdim=True))


class PlainMixes(Mixes):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.linear = nn.Linear(24, 24)


def differences(context: ParallelContext) -> list[str]:
    """Of logits from plain torch's: as it is, and with modules of the user's own."""
    found = []
    for kind in ("as it is", "a block of the user's", "patches and norm of the user's"):
        ours: Any = colossus.build(lambda kind=kind: changed(ViT(**SIZES), kind), context, dtype=torch.float64)
        twin = PlainViT(**SIZES)
        if kind == "a block of the user's":
            twin.blocks[0] = PlainMixes()
        if kind == "patches and norm of the user's":
            twin.patches, twin.norm = Stem(), nn.LayerNorm(24)
        twin.double().load_state_dict(full_state_dict(ours, context))
        logits = layers.to_whole(ours(own(context, IMAGES)))
        wanted = own(context, twin(IMAGES))
        error = (logits - wanted).abs().max().item()
        if error > 1e-12:
            found.append(f"{kind}: {error:.1e}")
    return found


class Stem(nn.Module):
    """Patches by a convolution of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, (2, 3), (2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).flatten(2).transpose(1, 2)


def changed(model: Any, kind: str) -> Any:
    if kind == "a block of the user's":
        model.blocks[0] = Mixes()
    if kind == "patches and norm of the user's":
        model.patches, model.norm = Stem(), nn.LayerNorm(24)
    return model


@pytest.mark.rest("1d_sequence", "2d_2x3")
@pytest.mark.parametrize("mode", ["1d_sequence", "2d_2x3", "3d_2x1x2"])
def test_it_is_plain_torch_whatever_a_user_changes(mode: str) -> None:
    for found in MODES[mode].run(differences):
        assert not found, "\n".join(found)


# -- in training ----------------------------------------------------------------------------------------------

TRAINED: dict[str, Any] = dict(type="ViT", **SIZES)


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
    alone = run_plan(1, config_of({}, 2, "fp64", model=TRAINED), 2)[0]
    assert_same_numbers(found["none False"][0], alone)
    assert found["none True"][0].losses != alone.losses
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
        (torch.zeros(2, 3, 8, 6, dtype=torch.uint8), "its input is of torch.uint8; it takes images of floating point"),
    ],
)
def test_images_that_are_refused(images: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        colossus.build(lambda: ViT(**SIZES))(images)
