"""Tied parameters and buffers in state dicts: under all their names, as in torch, and loaded from any of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

from colossus import layers
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

WORDS, WIDTH = 11, 6


class Tied(nn.Module):
    """Ours and plain, with the same names: a tied head, a tied pair of linears, and a buffer with two names."""

    def __init__(self, kind: Any = layers) -> None:
        super().__init__()
        self.embedding = kind.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        if kind is layers:
            self.head = layers.LMHead(WIDTH, WORDS, tied_to=self.embedding)
        else:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.first.register_buffer("scale", self.scale)
        self.register_buffer("unsaved", torch.ones(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(self.embedding(ids)))) * self.scale)


NAMES = [*Tied(nn).state_dict()]


def _loads(context: ParallelContext, states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    model = build(Tied, context)
    gradients = full_state_dict(model, context, gradients=True)
    assert not gradients
    for title, state in states.items():
        for parameter in model.parameters():
            parameter.data.zero_()
        load_full_state_dict(model, state, context)
        back = full_state_dict(model, context)
        assert sorted(back) == sorted(NAMES)
        assert back["head.weight"] is back["embedding.weight"]
        for name, value in states["both"].items():
            assert torch.equal(back[name], value), (title, name)
    assert "head.weight" not in full_state_dict(model, context, aliases=False)
    for wrong, message in (
        ({"embedding.weight", "head.weight"}, r"missing \['embedding.weight'\], not in the model none"),
        ({"scale", "first.scale"}, r"missing \['scale'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            load_full_state_dict(model, {k: v for k, v in states["both"].items() if k not in wrong}, context)
    return back


@pytest.mark.parametrize("world", [1, 2])
def test_tied_names_go_both_ways(world: int) -> None:
    """A plain tied twin loads ours strictly; ours loads the twin's, or either name of what is tied."""
    torch.manual_seed(3)
    whole = {name: value.clone() for name, value in Tied(nn).state_dict().items()}
    states = {"both": whole}
    for absent in ({"head.weight", "second.weight", "scale"}, {"embedding.weight", "first.weight", "first.scale"}):
        states[f"without {absent}"] = {name: value for name, value in whole.items() if name not in absent}
    for back in run_ranks(world, _loads, states):
        twin = Tied(nn)
        twin.load_state_dict(back, strict=True)
        for name, value in twin.state_dict().items():
            assert torch.equal(value, whole[name]), name
