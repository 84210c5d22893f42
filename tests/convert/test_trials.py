"""The run that looks for pairs or blocks is one of another model: nothing of it reaches the one that trains."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from helpers.user_models.cases import WIDTH, PlainKit, UserModel, classify, features
from helpers.user_models.table import Run, fill, twins
from helpers.user_models.unchanged import unchanged
from torch import Tensor, nn

import colossus


class Net(nn.Module):
    """Two blocks of a pair each, and a head."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HooksItself(Net):
    """As transformers' models do that give attention weights or hidden states."""

    is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.blocks[1].register_forward_hook(lambda module, args, out: out * 2)
        return super().forward(x)


class Scales(Net):
    """Its first batch sets the scale of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("is_set", torch.tensor(0))
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.copy_(x.detach().std())
            self.is_set.fill_(1)
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x))[:, None] / len(x)
        return super().forward(x / self.scale + self.tables[len(x)])


class Normed(Net):
    """Statistics of a norm that stays torch's, since another holds its class's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(WIDTH), type("Mine", (nn.BatchNorm1d,), {})(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.other(self.norm(x)))


class Drawn(Net):
    """Random numbers of Python's and of torch's in the constructor, of which some are asked for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.tensor([random.random(), torch.rand(()).item()]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.drawn.sum())


class Counts(Net):
    """Is in eval mode when it is made, and notes at each call in which mode it is."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return super().forward(x) * len(self.modes)


class Around(nn.Module):
    """A model as it is inside of another one, made before it is parallelized; the other one draws after it."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        inner = Drawn()
        self.inner = inner if kit is PlainKit else colossus.parallelize(lambda: inner, example=EXAMPLE)()
        self.register_buffer("drawn", torch.tensor([random.random(), torch.rand(()).item()]))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.drawn.sum()


EXAMPLE = torch.ones(2, WIDTH)
MADE_BEFORE = Scales()
ROWS = {
    row.name: row
    for row in (
        *(
            unchanged(each.__name__, each, features, classify, example=EXAMPLE)
            for each in (HooksItself, Scales, Normed, Drawn, Counts)
        ),
        unchanged("made before", Scales, features, classify, example=EXAMPLE, factory=lambda: MADE_BEFORE),
        UserModel("around", Around, features, classify),
    )
}
#: what a pipeline cannot run, or runs in each microbatch anew
NO_PIPELINE = ("HooksItself", "Counts", "Scales", "made before", "Normed", "around")


@cache
def oracle() -> dict[str, Run]:
    return twins([*ROWS.values()])


@pytest.mark.parametrize("plan", ["1d 2", "pipeline 2 1f1b"])
def test_the_model_that_trains_is_as_its_constructor_left_it(plan: str) -> None:
    rows = [row for row in ROWS.values() if not plan.startswith("pipeline") or row.name not in NO_PIPELINE]
    wrong = [cell for cell in fill(rows, [plan], oracle()) if not cell.holds]
    assert not wrong, "\n".join(f"{cell.model} under {cell.plan}: {cell.outcome}: {cell.words}" for cell in wrong)
