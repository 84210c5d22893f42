"""Modules that the data, or chance, chooses: ranks that go apart get an error in words, in place of others' weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.long import but, long
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.state.model_state_dict import full_state_dict

WIDTH, SAMPLES, STEPS = 4, 8, 3
ZERO_3: dict[str, Any] = dict(data=2, zero=3)
TWO_D: dict[str, Any] = dict(tensor=dict(mode="2d", size=4))
THREE_D: dict[str, Any] = dict(tensor=dict(mode="3d", size=4, shape=(2, 1, 2)))


class Experts(nn.Module):
    """Two modules of equal size; the first sample decides which one runs."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0] > 0)](self.start(x))


class Tasks(Experts):
    """Each sample by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.experts[int(row[0, 0] > 0)](row) for row in self.start(x).split(1)])


class Skipped(Experts):
    """The second module is left out for some."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.experts[0](self.start(x))
        return y if x[0, 0] > 0 else self.experts[1](y)


class LayerDrop(nn.Module):
    """Modules that chance leaves out."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.blocks = nn.ModuleList([layers.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.draw() < 0.5:
                x = x + torch.tanh(block(x))
        return x


def squares(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return y.square().sum(), y.shape[0]


def batch_of(step: int) -> Tensor:
    """Whose halves go different ways, as do the halves of these."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() * torch.tensor([1, -1, 1, -1, -1, 1, -1, 1])
    return x


def _train(
    rank: int, parallel: dict[str, Any], make: Callable[[], nn.Module], microbatches: int = 1, has_headers: bool = True
) -> tuple[list[float], dict[str, Tensor]] | str:
    """Losses and weights, or the error and the steps before it."""
    config = dict(
        parallel=parallel,
        schedule=dict(microbatches=microbatches),
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(timeout_seconds=20.0, shared_memory=has_headers),
        device="cpu",
    )
    engine = colossus.initialize(config, model=make, loss_fn=squares)
    count = engine.context.size("data")
    try:
        losses = [
            engine.train_step(batch_of(step).chunk(count)[engine.context.index("data")]).loss for step in range(STEPS)
        ]
        return losses, full_state_dict(engine.model, engine.context)
    except RuntimeError as error:
        return f"{error}, after {engine.completed_steps} steps"
    finally:
        engine.close()


def sharded() -> nn.Module:
    return Experts(lambda: layers.Linear(WIDTH, WIDTH))


def norms() -> nn.Module:
    return Experts(lambda: layers.BatchNorm1d(WIDTH))


REFUSED: dict[str, tuple[int, dict[str, Any], Callable[[], nn.Module], str]] = {
    "zero 3": (2, ZERO_3, Experts, "experts.0.weight, experts.0.bias"),
    "zero 3, each sample": (2, ZERO_3, Tasks, "experts.0.weight, experts.0.bias"),
    "zero 3, some skip": (2, ZERO_3, Skipped, "experts.1.weight, experts.1.bias"),
    "2d": (4, TWO_D, sharded, "experts.0.weight"),
    "3d": (4, THREE_D, sharded, "experts.0.weight"),
    "batch norm": (2, dict(data=2), norms, "experts.0.weight"),
}


def _require_refusal(name: str, has_headers: bool) -> None:
    world, parallel, make, parameter = REFUSED[name]
    results = run_ranks(world, _train, parallel, make, 1, has_headers, with_context=False)
    assert all(isinstance(message, str) and message.endswith("after 0 steps") for message in results), results
    # a rank may meet the end of another before it has read what that one sent
    words = [message for message in results if "the ranks do not run the same program" in message]
    assert any(parameter in message for message in words), results


@pytest.mark.parametrize("name", but(("zero 3, each sample", "3d", "batch norm"), REFUSED))
def test_ranks_that_choose_other_modules_are_told_at_once(name: str) -> None:
    _require_refusal(name, has_headers=True)


@pytest.mark.parametrize("name", ["zero 3", *long("2d", "3d", "batch norm")])
def test_without_headers_they_are_told_before_the_update(name: str) -> None:
    """Where they run as many collectives; else they wait for each other until ``comm.timeout_seconds``."""
    _require_refusal(name, has_headers=False)


@pytest.mark.parametrize("parallel", [dict(data=2, zero=2), *long(dict(data=2))], ids=["zero 2", "data"])
def test_data_ranks_with_whole_weights_may_choose(parallel: dict[str, Any]) -> None:
    losses, weights = run_ranks(1, _train, {}, Experts, 2, with_context=False)[0]
    for other, others in run_ranks(2, _train, parallel, Experts, with_context=False):
        torch.testing.assert_close(other, losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(others, weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("parallel", "draw"),
    [
        (ZERO_3, random.random),
        pytest.param(ZERO_3, np.random.rand, marks=pytest.mark.long),
        pytest.param(TWO_D, np.random.rand, marks=pytest.mark.long),
    ],
    ids=["zero 3, random", "zero 3, numpy", "2d, numpy"],
)
def test_layers_that_chance_leaves_out_are_those_of_one_process(
    parallel: dict[str, Any], draw: Callable[[], float]
) -> None:
    losses, weights = run_ranks(1, _train, {}, lambda: LayerDrop(draw), with_context=False)[0]
    world = 2 if parallel is ZERO_3 else 4
    for other, others in run_ranks(world, _train, parallel, lambda: LayerDrop(draw), with_context=False):
        torch.testing.assert_close(other, losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(others, weights, rtol=1e-10, atol=1e-12)
