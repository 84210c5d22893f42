"""What ranks must agree on is checked, not trusted: batches in every step; values, settings and code at the start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.config import ConfigError
from colossus.engine.consistency import fingerprint
from colossus.layout.split_parameter import as_shards

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(WIDTH, 8, split="column"), layers.Linear(8, 4, split="row")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def loss_fn(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def settings(parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    return dict(parallel=parallel, train=dict(global_batch_size=8, seed=3), device="cpu") | more


def numbers(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


# -- batches ------------------------------------------------------------------------------------------------------


def _step(rank: int, parallel: dict[str, Any], factory: Any, seeds: list[int], good_steps: int) -> str:
    """The error of a step on batches of these seeds, one for each rank, after some on one batch; and what it leaves."""
    engine = colossus.initialize(settings(parallel), model=factory, loss_fn=loss_fn)
    for step in range(good_steps):
        engine.train_step(numbers(step))
    before = [param.detach().clone() for param in engine.model.parameters()]
    try:
        engine.train_step(numbers(seeds[rank]))
    except ValueError as error:
        with as_shards():
            assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
        assert engine.completed_steps == good_steps
        return str(error)
    else:
        return "no error"


@pytest.mark.parametrize(
    ("parallel", "factory", "seeds"),
    [
        (dict(tensor=2), Net, [0, 1]),  # no weight is split: there was no call over tensor ranks
        (dict(data=2, tensor=2), Pair, [0, 0, 1, 0]),
        (dict(data=2, tensor=2), Net, [0, 1, 1, 0]),  # what errors that cancel look like
        (dict(tensor=dict(mode="2d", size=4)), Pair, [0, 0, 0, 1]),
    ],
)
def test_ranks_that_share_a_batch_must_get_the_same(parallel: dict[str, Any], factory: Any, seeds: list[int]) -> None:
    """A `DistributedSampler` over the world trains on in silence otherwise: loss and norm agree on all ranks."""
    (error,) = set(run_ranks(len(seeds), _step, parallel, factory, seeds, 1, with_context=False))
    assert "ranks that share a batch have different ones: under this plan every" in error
    assert "engine.context.index('data')" in error


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.uint16, torch.complex64, torch.float64]
)
def test_a_mark_reads_every_type(dtype: torch.dtype) -> None:
    values = torch.arange(12).remainder(2).to(dtype).reshape(3, 4)
    other = 1 - torch.arange(12).remainder(2)
    assert fingerprint({"x": values}) == fingerprint({"x": values.clone()})
    assert fingerprint({"x": values}) != fingerprint({"x": other.to(dtype).reshape(3, 4)})
    assert fingerprint({"x": values.T}) != fingerprint({"x": values})
    fingerprint([values[:0], torch.tensor(1.0), torch.eye(3).to_sparse(), "name"])


# -- settings -----------------------------------------------------------------------------------------------------


def _start(rank: int, configs: list[dict[str, Any]], factories: list[Any]) -> str:
    try:
        colossus.initialize(configs[rank], model=factories[rank], loss_fn=loss_fn).close()
    except ConfigError as error:
        return str(error)
    else:
        return "no error"


def test_ranks_with_different_configs_are_refused() -> None:
    """Each key that differs is named, also when it is the plan itself: the groups of two plans wait for each other."""
    first = settings(dict(data=2), optimizer=dict(type="SGD", lr=0.1, momentum=0.9))
    second = settings(dict(tensor=2), optimizer=dict(type="SGD", lr=0.2), train=dict(global_batch_size=8, seed=4))
    errors = run_ranks(2, _start, [first, second], [Net, Net], with_context=False, timeout=20)
    assert len(set(errors)) == 1
    for line in (
        "parallel.data: 2 on rank 0; 1 on rank 1",
        "parallel.tensor.size: 1 on rank 0; 2 on rank 1",
        "optimizer.lr: 0.1 on rank 0; 0.2 on rank 1",
        "optimizer.momentum: 0.9 on rank 0; absent on rank 1",
        "train.seed: 3 on rank 0; 4 on rank 1",
    ):
        assert line in errors[0]
    assert "steps" not in errors[0]


# -- initial values -----------------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """Can be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.register_buffer("scale", torch.rand(WIDTH))

    def pipeline_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Unseeded(Net):
    """Draws from a generator that each process seeds by itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        values = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH))
        with torch.no_grad():
            self.linear.weight.copy_(torch.from_numpy(values))


def _start_with(rank: int, parallel: dict[str, Any], make: Any) -> str:
    try:
        engine = colossus.initialize(settings(parallel), model=make(rank), loss_fn=loss_fn)
    except ValueError as error:
        return str(error)
    engine.close()
    return "no error"


def _outside(seed: int) -> Any:
    torch.manual_seed(seed)
    net = Sequence()
    return lambda: net


@pytest.mark.parametrize("parallel", [dict(data=2), dict(tensor=2), dict(pipeline=2)])
def test_a_model_made_outside_must_be_the_same_on_all_ranks(parallel: dict[str, Any]) -> None:
    """Unseeded it is another one on each: loss and norm agree, and every rank trains its own."""

    def body(rank: int) -> tuple[str, str]:
        return _start_with(rank, parallel, _outside), _start_with(rank, parallel, lambda rank: _outside(5))

    ((error, fine),) = set(run_ranks(2, body, with_context=False))
    assert "blocks.0.weight, blocks.0.bias" in error
    assert "would start with other values on rank 1 than on rank 0" in error
    assert fine == "no error"


def test_a_constructor_must_give_all_ranks_the_same() -> None:
    body = run_ranks(3, _start_with, dict(tensor=3), lambda rank: lambda: Unseeded(rank // 2), with_context=False)
    (error,) = set(body)
    assert error.startswith("linear.weight would start with other values on rank 2 than on ranks 0, 1")
