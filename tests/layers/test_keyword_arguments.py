"""What a layer is made with, and what its forward is called with, has the names that it has in torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from colossus import layers
from colossus.convert.layer_table import ROWS, Row
from colossus.layers.layer import Layer
from colossus.layers.lora import LoRALinear

#: layers that have the name of a module of torch
NAMESAKES = [name for name in layers.__all__ if hasattr(nn, name)]


def names(function: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(function).parameters]


@pytest.mark.parametrize("row", [row for row in ROWS if row.torch is not None], ids=lambda row: row.ours.__name__)
def test_a_forward_takes_the_keyword_arguments_of_torch(row: Row) -> None:
    assert issubclass(row.ours, Layer)
    assert row.torch is not None
    assert names(row.ours.forward) == names(row.torch.forward)


def test_what_takes_the_place_of_a_linear_is_called_as_one() -> None:
    assert names(LoRALinear.forward) == names(nn.Linear.forward)


@pytest.mark.parametrize("name", NAMESAKES)
def test_a_constructor_takes_the_arguments_of_torch(name: str) -> None:
    """By position those in front of torch's private ones, all others by keyword."""
    theirs, ours = (inspect.signature(getattr(owner, name).__init__).parameters for owner in (nn, layers))
    public = [key for key, value in theirs.items() if not key.startswith("_") and value.kind is not value.KEYWORD_ONLY]
    by_position = [key for key, value in ours.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    assert by_position == public[: len(by_position)]
    assert set(public[len(by_position) :]) <= {"device", "dtype"}
    takes_all = any(value.kind is value.VAR_KEYWORD for value in ours.values())
    assert takes_all or {key for key in theirs if not key.startswith("_")} <= ours.keys()
    for key in by_position[1:]:
        assert ours[key].default == theirs[key].default, key


def test_the_loss_is_called_as_torch_calls_it() -> None:
    assert len(NAMESAKES) == 10
    assert names(layers.cross_entropy)[:2] == names(layers.accuracy)[:2] == names(F.cross_entropy)[:2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: layers.Embedding(3, 2, max_norm=1.0), "Embedding: max_norm and scale_grad_by_freq"),
        (lambda: layers.Embedding(3, 2, None, None, 2.0, True), "Embedding: max_norm and scale_grad_by_freq"),
        (lambda: layers.EmbeddingBag(3, 2, include_last_offset=True), "EmbeddingBag: it takes no offsets"),
        (lambda: layers.SyncBatchNorm(3, process_group=object()), "leave process_group out"),  # type: ignore[arg-type]
    ],
)
def test_what_a_layer_cannot_do_is_refused_in_words(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
