"""Random numbers that a forward draws around its blocks: under a pipeline they are those of a run without one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus

BATCH, WIDTH, STEPS = 4, 6, 3


class Block(nn.Module):
    """A block that draws from all generators, and uses nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand_like(x) + random.random() + np.random.rand()
        return x + self.own(x).tanh() + 0 * drawn


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def blocks(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x)
        return x


class Noise(Drawing):
    """What is drawn before the blocks is subtracted behind them."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return self.blocks(noise + x) - noise


class Diffusion(Drawing):
    """Noise and a time for each sample; what the noise is like is computed from parameters."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        time, noise = torch.rand(len(x), 1, dtype=x.dtype), torch.randn_like(hidden)
        return (self.blocks(hidden * (1 - time) + noise * time) - noise) / (time + 1)


class Flow(Drawing):
    """Numbers of numpy and Python, in a module that has no parameters, too."""

    class Times(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (random.random() + torch.from_numpy(np.random.rand(len(x), 1))).to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.times = self.Times()

    def forward(self, x: Tensor) -> Tensor:
        time, start = self.times(x), torch.empty_like(x).normal_()
        return self.blocks(self.stem(start + (x - start) * time)) - (x - start)


class MaskedAutoencoder(Drawing):
    """What is dropped where parameters are, and then an order of positions, which is undone behind the blocks."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.own(x), 0.3, self.training)

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.Stem()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        order = torch.rand(WIDTH).argsort()
        hidden = self.blocks(hidden[:, order])
        return hidden[:, order.argsort()] * (torch.rand(len(x), 1) < 2)  # behind the blocks others are drawn


KINDS: tuple[Callable[[], nn.Module], ...] = (Noise, Diffusion, Flow, MaskedAutoencoder)
PLANS: dict[str, dict[str, Any]] = {
    "1f1b": dict(schedule=dict(type="1f1b")),
    "full, zb-h1": dict(schedule=dict(type="zb-h1"), checkpoint="full"),
    "interleaved": dict(schedule=dict(type="interleaved")),
    "zb-v, selective": dict(schedule=dict(type="zb-v"), checkpoint="selective"),
}


def losses(pipeline: int, schedule: dict[str, Any], checkpoint: str = "none") -> list[list[float]]:
    found = []
    for kind in KINDS:
        config = dict(
            parallel=dict(pipeline=pipeline),
            schedule=schedule | dict(microbatches=2),
            optimizer=dict(type="SGD", lr=0.05),
            train=dict(global_batch_size=BATCH, precision="fp64", seed=3, activation_checkpoint=dict(type=checkpoint)),
            device="cpu",
        )
        make = colossus.parallelize(kind, example=torch.zeros(2, WIDTH))
        engine = colossus.initialize(config, model=make, loss_fn=lambda out, batch: (out.square().sum(), len(out)))
        points = torch.linspace(-1, 1, BATCH * WIDTH, dtype=torch.float64).view(BATCH, WIDTH)
        found.append([engine.train_step({"inputs": points}).loss for _ in range(STEPS)])
        engine.close()
    return found


@pytest.mark.parametrize("name", but([name for name in PLANS if name != "full, zb-h1"], PLANS))
def test_what_is_drawn_around_blocks_is_drawn_once(name: str) -> None:
    (alone,) = run_ranks(1, lambda rank: losses(1, dict(type="1f1b")), with_context=False)
    for of_rank in run_ranks(2, lambda rank: losses(2, **PLANS[name]), with_context=False):
        for kind, of_kind, wanted in zip(KINDS, of_rank, alone, strict=True):
            assert of_kind == pytest.approx(wanted, rel=1e-10), kind.__name__
