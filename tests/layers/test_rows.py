"""Numbers of rows that a tensor mode cannot exchange: right all the same, or refused with the layer's name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.modes import MODES, Mode
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext

BATCH, TOKENS, HIDDEN, HEADS = 12, 6, 24, 4
#: with other numbers of ranks along j and k
UNEVEN = Mode("3d", (1, 1, 2))


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, HIDDEN))
        self.up, self.down = layers.Linear(HIDDEN, 48, split="column"), layers.Linear(48, HIDDEN, split="row")
        self.head = layers.LMHead(HIDDEN, 11)

    def forward(self, count: int) -> Tensor:
        return self.down(self.up(self.start.expand(count, -1)))[0]


def test_a_row_that_all_samples_share() -> None:
    def body(context: ParallelContext) -> str:
        model: Any = colossus.build(Constant, context)
        assert model(2).shape == (HIDDEN,)  # as the message says
        try:
            model(1)
        except ValueError as error:
            return str(error)
        return "nothing"

    for words in UNEVEN.run(body):
        assert words.startswith("up (Linear), given (1, 24) on this rank: dim 0 of a tensor of shape (1, 48) has 1 "), (
            words
        )
        assert "x.expand(n, ..)" in words


@pytest.mark.parametrize("name", ["up", "head"])
def test_rows_chosen_by_a_mask(name: str) -> None:
    """In 2D each rank may have other rows; where samples travel between ranks the message says what to do."""

    def body(context: ParallelContext) -> list[str]:
        model: Any = colossus.build(Constant, context, dtype=torch.float64)
        x = torch.ones(3, TOKENS, HIDDEN, dtype=torch.float64)
        mask = torch.zeros(3, TOKENS, dtype=torch.bool)
        mask[: 1 + context.rank] = True
        try:
            getattr(model, name)(x[mask])
        except RuntimeError as error:
            return [str(error), *error.__notes__]
        return []

    for words in Mode("3d", (1, 2, 1)).run(body):
        assert len(words) == 2, words
        assert "other numbers of rows" in words[0]
        assert "torch.where" in words[0]
        assert re.match(rf"in {name} \(\w+\), given \(", words[1]), words[1]
    for words in Mode("2d", (2, 1)).run(body):
        assert words == []


def test_another_number_of_features() -> None:
    def body(context: ParallelContext) -> str:
        model: Any = colossus.build(Constant, context)
        try:
            model.down(torch.ones(2, TOKENS, 7))
        except ValueError as error:
            return str(error)
        return "nothing"

    for words in MODES["2d"].run(body):
        assert words == "down (Linear): it takes 48 features, but its input has 7"
