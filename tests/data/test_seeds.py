"""What a dataset draws while sample i is read depends on (seed, epoch, i): not on the plan, the batch size, workers or
a resume. Data that says it draws nothing is read as it is."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from helpers.datasets import loaders
from torch import Tensor
from torch.utils.data import Dataset, Subset

from colossus.data.sampler import BatchShard, SampleOrder

SEED, SAMPLES, BATCH = 3, 29, 8


def drawn() -> list[float]:
    return [float(torch.rand(())), random.gauss(0, 1), float(np.random.randn())]


class Noisy(Dataset[Tensor]):
    """Sample ``i`` is ``i`` and draws from each global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *drawn()], dtype=torch.float64)


class AtOnce(Noisy):
    """Fetches many at once."""

    def __init__(self, *, deterministic: bool) -> None:
        self.fetches: list[int] = []
        self.deterministic = deterministic

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.fetches.append(len(indices))
        return [self[index] for index in indices]


def by_place(runs: list[list[Tensor]]) -> dict[tuple[int, int], list[float]]:
    """(epoch, i) -> what sample i drew there, of the batches of all data ranks."""
    rows = [row for step in zip(*runs, strict=True) for part in step for row in part.tolist()]
    return {(place // SAMPLES, int(row[0])): row[1:] for place, row in enumerate(rows)}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, int], list[float]]:
    """Read sample by sample, in plain Python."""
    found = {}
    order = SampleOrder(BatchShard(SEED, 1, 0, 1, endless=True), SAMPLES)
    for step in range(3 * SAMPLES):
        (index,) = order.indices(step, (0, 1))
        (seed,) = order.seeds(step, (0, 1), np.array([index]))
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed % 2**32)
        found[step // SAMPLES, int(index)] = drawn()
    return found


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Noisy, {}),
        (Noisy, {"num_workers": 2}),
        (lambda: AtOnce(deterministic=False), {}),
        (lambda: AtOnce(deterministic=True), {"seed_samples": True, "num_workers": 1}),
        (lambda: Subset(Noisy(), range(SAMPLES)), {}),
    ],
)
def test_each_sample_is_read_under_a_seed_of_its_own(
    data: Any, options: dict[str, Any], alone: dict[tuple[int, int], list[float]]
) -> None:
    for size, batch in ((1, 13), (2, 8)):
        runs = []
        for rank in range(size):
            train = loaders({"type": data, **options}, rank, size, global_batch_size=batch).train
            runs.append(list(islice(train, 3 * SAMPLES // batch)))
        found = by_place(runs)
        assert len(found) == 3 * SAMPLES // batch * batch
        assert found == {place: alone[place] for place in found}


def test_seeds_differ_between_samples_and_epochs_and_stay_what_they_are(
    alone: dict[tuple[int, int], list[float]],
) -> None:
    for kind in range(3):
        assert len({draws[kind] for draws in alone.values()}) == len(alone)
    order = SampleOrder(BatchShard(0, 4, 0, 1, endless=True), 10)
    indices = order.indices(2, (0, 4))  # of which the first two end an epoch
    assert indices.tolist() == [4, 2, 2, 4]
    assert order.seeds(2, (0, 4), indices) == [
        812032621871913657,
        944855295644859466,
        4893020357439545657,
        879342224903393801,
    ]


@pytest.mark.parametrize("says", [{"deterministic": True}, {"deterministic": False, "seed_samples": False}])
def test_data_that_draws_nothing_is_not_seeded(says: dict[str, Any]) -> None:
    data = AtOnce(deterministic=says.pop("deterministic"))
    train = loaders({"type": data, **says}, 1, 2).train
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [drawn() for _ in range(BATCH)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert [row[1:] for _ in range(2) for row in next(train).tolist()] == expected
    assert data.fetches == [BATCH // 2, BATCH // 2]


def test_a_collate_fn_draws_by_its_step_and_its_data_rank() -> None:
    class Quiet(Noisy):
        deterministic = True

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor(float(index))

    def mixing(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + 0.4 * torch.rand(len(samples)) + 0.01 * random.random()

    data = {"type": Quiet, "collate_fn": mixing, "num_workers": 1}
    train = loaders(data, 1, 2).train
    run = [next(train) for _ in range(4)]
    plain = loaders({**data, "num_workers": 0}, 1, 2).train
    plain.set_step(2)
    torch.manual_seed(7)
    assert torch.equal(next(plain), run[2])
    noise = [(batch - batch.floor()).round(decimals=4) for batch in (*run, next(loaders(data, 0, 2).train))]
    assert len({tuple(each.tolist()) for each in noise}) == 5
