"""Functions that work in place on what a block of ZeRO 3 takes and gives: views of results are made anew by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.state.model_state_dict import full_state_dict

BATCH, TOKENS, FEATURES, STEPS = 4, 3, 4, 2


def relu() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))


def several() -> nn.Module:
    first = nn.Sequential(nn.Linear(4, 8), nn.SiLU(inplace=True), nn.Dropout(0.0, inplace=True))
    return nn.Sequential(first, nn.Linear(8, 8), nn.LeakyReLU(0.1, inplace=True), nn.LayerNorm(8), nn.Linear(8, 4))


class Parts(nn.Module):
    """Writes to parts of a result, and to what a block takes."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.scaled, self.out = nn.Linear(4, 12), Scaled(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x).split(4, dim=-1)
        h = self.scaled(q + k + v)
        h[..., 0] = 0.0
        h += x
        return self.out(h.transpose(0, 1)).mul_(2.0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        x.mul_(2.0)
        return self.linear(x).add_(self.scale).view(-1, TOKENS, FEATURES)


class Written(nn.Module):
    """A block that writes to its input, a view of another block's result."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.blocks = nn.Linear(4, 4), nn.ModuleList(Adds() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for block in self.blocks:
            h = block(h)
        return h


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.linear(x * 2.0))


MODELS: tuple[Callable[[], nn.Module], ...] = (relu, several, Parts, Written)


def loss_fn(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.numel()


def inputs(step: int) -> Tensor:
    return torch.arange(BATCH * TOKENS * FEATURES, dtype=torch.float64).add(step).sin().view(BATCH, TOKENS, FEATURES)


def train(rank: int) -> list[tuple[Any, Any]]:
    ends = []
    for make in MODELS:
        config = dict(
            parallel=dict(data=2, zero=3),
            optimizer=dict(type="SGD", lr=0.1),
            train=dict(global_batch_size=BATCH, precision="fp64"),
            device="cpu",
        )
        engine = colossus.initialize(config, model=make, loss_fn=loss_fn)
        start = {name: value.clone() for name, value in full_state_dict(engine.model, engine.context).items()}
        for step in range(STEPS):
            engine.train_step({"inputs": inputs(step).chunk(2)[rank]})
        ends.append((start, full_state_dict(engine.model, engine.context)))
        engine.close()
    return ends


def test_blocks_whose_results_are_written_to_train_as_in_plain_torch() -> None:
    for make, (start, end) in zip(MODELS, run_ranks(2, train, with_context=False)[0], strict=True):
        model = make().double()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            total, count = loss_fn(model(inputs(step)), None)
            (total / count).backward()
            optimizer.step()
        torch.testing.assert_close(end, dict(model.state_dict()), rtol=1e-10, atol=1e-10)
