"""Global generators in a user's ``forward``: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers

WIDTH, SAMPLES, STEPS = 6, 4, 3


class Drawing(nn.Module):
    """Draws from all three, and keeps what it drew; ``plain`` is a parameter that every rank of a model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(WIDTH, WIDTH), layers.Linear(WIDTH, WIDTH)
        self.plain = nn.Parameter(torch.ones(WIDTH))
        self.drawn: list[tuple[float, float, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append((random.random(), float(np.random.randn()), float(torch.rand(()))))
        return self.down(torch.tanh(self.up(x))) * self.plain * self.drawn[-1][0] + self.drawn[-1][1]


def squares(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return y.square().sum(), y.shape[0]


def settings(parallel: dict[str, Any], microbatches: int = 1) -> dict[str, Any]:
    return dict(
        parallel=parallel,
        schedule=dict(microbatches=microbatches),
        optimizer=dict(type="SGD", lr=0.01),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        device="cpu",
    )


def _train(rank: int, parallel: dict[str, Any], start: int = 0) -> tuple[list[Any], Tensor]:
    engine = colossus.initialize(settings(parallel, 2), model=Drawing, loss_fn=squares)
    engine.run.completed_steps = start
    for step in range(STEPS):
        if rank == 0:  # a rank's own business: a name for a file, a generated sample
            random.random(), np.random.rand(), torch.rand(3)
        count = engine.context.size("data")
        batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        engine.train_step(batch.chunk(count)[engine.context.index("data")])
    model: Any = engine.model
    engine.close()
    return model.drawn, model.plain.detach()


@pytest.mark.parametrize("parallel", [dict(tensor=2), dict(tensor=dict(mode="2d", size=4))], ids=["1d", "2d"])
def test_plain_parameters_stay_together_whatever_a_forward_draws(parallel: dict[str, Any]) -> None:
    alone = run_ranks(1, _train, {}, with_context=False)[0]
    world = 2 if parallel["tensor"] == 2 else 4
    for drawn, plain in run_ranks(world, _train, parallel, with_context=False):
        assert [each[:2] for each in drawn] == [each[:2] for each in alone[0]]
        torch.testing.assert_close(plain, alone[1], rtol=1e-10, atol=1e-12)


def test_data_ranks_draw_other_numbers_for_samples_and_the_same_for_the_program() -> None:
    (alone, _), *_ = run_ranks(1, _train, {}, with_context=False)
    (first, _), (second, _) = run_ranks(2, _train, dict(data=2), with_context=False)
    assert not {each[2] for each in first} & {each[2] for each in second}
    assert [each[:2] for each in first] == [each[:2] for each in second] == [each[:2] for each in alone]


def test_a_resumed_run_draws_what_the_whole_run_would() -> None:
    whole = run_ranks(1, _train, {}, with_context=False)[0][0]
    assert len({value for each in whole for value in each}) == 3 * 2 * STEPS  # nothing repeats
    assert run_ranks(1, _train, {}, 2, with_context=False)[0][0][:2] == whole[4:]


def _draws_outside(rank: int, parallel: dict[str, Any]) -> list[float]:
    engine = colossus.initialize(settings(parallel), model=Drawing, loss_fn=squares)
    seen: list[float] = []
    for _ in range(2):
        seen += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        state = random.getstate(), torch.get_rng_state()
        engine.train_step(torch.ones(SAMPLES, WIDTH))
        engine.eval_step(torch.ones(SAMPLES, WIDTH))
        assert random.getstate() == state[0]
        assert torch.equal(torch.get_rng_state(), state[1])
    engine.close()
    return seen


def test_ranks_of_a_model_draw_alike_outside_of_forwards() -> None:
    """A user's own DataLoader that shuffles gives them the same batches, also where the mode splits the batch."""
    first, *others = run_ranks(4, _draws_outside, dict(tensor=dict(mode="2d", size=4)), with_context=False)
    assert all(other == first for other in others)


class Masked(nn.Module):
    """A plain nn.Dropout; the mask it drew is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.masks.append(self.dropout(torch.ones_like(x)))
        return self.linear(x) * self.masks[-1]


def _masks(rank: int, parallel: dict[str, Any]) -> tuple[int, Tensor]:
    engine = colossus.initialize(settings(parallel), model=Masked, loss_fn=squares)
    engine.train_step(torch.ones(SAMPLES, 8, WIDTH))
    model: Any = engine.model
    engine.close()
    return engine.context.index("sequence"), layers.local(model.masks[0])


def test_shards_of_a_sequence_have_masks_of_their_own() -> None:
    results = run_ranks(4, _masks, dict(sequence=2, tensor=2), with_context=False)
    by_shard: dict[int, list[Tensor]] = {0: [], 1: []}
    for index, mask in results:
        by_shard[index].append(mask)
    assert all(torch.equal(*masks) for masks in by_shard.values())  # tensor ranks hold the same tokens
    assert not torch.equal(by_shard[0][0], by_shard[1][0])
