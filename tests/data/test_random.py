"""What a user's data code draws depends on the sample and its place in the data, not on the plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, random_split

from colossus.data import Loaders, build_loaders

BATCH, SAMPLES = 8, 29


def loaders(data: Any, rank: int = 0, size: int = 1) -> Loaders:
    return build_loaders(data, seed=3, global_batch_size=BATCH, data_rank=rank, data_size=size)


def drawn() -> Tensor:
    return torch.tensor([float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


class Noisy(Dataset[Tensor]):
    """Sample ``i`` is ``i`` and one draw from each global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat((torch.tensor([float(index)]), drawn()))


class NoisyStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(SAMPLES):
            yield torch.cat((torch.tensor([float(index)]), drawn()))


class Quiet(Dataset[Tensor]):
    """Fetches many at once, and draws nothing."""

    def __init__(self) -> None:
        self.fetches: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.fetches.append(len(indices))
        return [torch.full((4,), float(index)) for index in indices]

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("fetches many at once")


def mixing(samples: list[Tensor]) -> Tensor:
    """Draws once for the batch and once for each sample, and mixes neighbours."""
    batch = torch.stack(samples)
    weight = drawn()[0]
    return batch + weight * batch.roll(1, 0) + torch.rand(len(samples), 1) + np.random.rand() + random.random()


def split_by_torch() -> Any:
    return random_split(Noisy(), [SAMPLES - 4, 4], generator=torch.Generator().manual_seed(5))[0]


KINDS: dict[str, Callable[[], Any]] = {
    "subset": lambda: Subset(Noisy(), range(2, SAMPLES)),
    "subset of subset": lambda: Subset(Subset(Noisy(), range(2, SAMPLES)), range(0, 20, 2)),
    "random_split": split_by_torch,
    "many at once": Quiet,
    "stream": NoisyStream,
    "collate": lambda: {"type": Noisy, "collate_fn": mixing},
    "collate of a stream": lambda: {"type": NoisyStream, "collate_fn": mixing},
    "collate of a subset": lambda: {"type": lambda: Subset(Noisy(), range(2, SAMPLES)), "collate_fn": mixing},
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [2, 8])
def test_data_ranks_together_read_the_batch_of_one_process(name: str, size: int) -> None:
    whole = list(islice(loaders(KINDS[name]()).train, 5))
    parts = [list(islice(loaders(KINDS[name](), rank, size).train, 5)) for rank in range(size)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[step] for part in parts]), batch)


def test_many_are_fetched_at_once_where_nothing_is_drawn() -> None:
    quiet = Quiet()
    train = loaders(quiet, 1, 2).train
    next(train), next(train)
    assert quiet.fetches == [4, 4]


@pytest.mark.parametrize("name", ["subset", "collate", "collate of a subset", "stream", "collate of a stream"])
def test_workers_draw_what_the_main_process_draws(name: str) -> None:
    made = KINDS[name]()
    data = made if isinstance(made, dict) else {"type": lambda: made}
    plain, workers = loaders(data, 1, 2).train, loaders({**data, "num_workers": 1}, 1, 2).train
    for _ in range(6):  # into the second pass
        assert torch.equal(next(plain), next(workers))


def test_two_workers_on_one_stream_are_refused() -> None:
    words = r"num_workers = 2, but NoisyStream is an IterableDataset: .* every sample would come 2 times"
    with pytest.raises(ValueError, match=words):
        loaders({"type": NoisyStream, "num_workers": 2})


# -- generators of a loader's own ----------------------------------------------------------------------------------


class OwnSampler(torch.utils.data.Sampler[int]):
    """Shuffles with generators of its own, of numpy and of Python."""

    def __init__(self) -> None:
        self.numpy, self.python = np.random.default_rng(5), random.Random(6)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = self.numpy.permutation(SAMPLES).tolist()
        self.python.shuffle(order)
        return iter(order)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "generator": lambda: DataLoader(
        Noisy(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7), drop_last=True
    ),
    "sampler": lambda: DataLoader(Noisy(), batch_size=BATCH, sampler=OwnSampler(), drop_last=True),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("step", [0, 1, 3, 5, 8])
def test_a_place_in_any_pass_is_found_again(name: str, step: int) -> None:
    whole = list(islice(loaders(LOADERS[name]()).train, 12))
    train = loaders(LOADERS[name]()).train
    for _ in range(step):
        next(train)
    state = train.state_dict()
    resumed = loaders(LOADERS[name]()).train
    resumed.load_state_dict(state)
    for batch in whole[step:]:
        assert torch.equal(next(resumed)[:, 0], batch[:, 0])
    resumed.load_state_dict(state)  # and in a loader that has moved on
    assert torch.equal(next(resumed)[:, 0], whole[step][:, 0])


@pytest.mark.parametrize("name", LOADERS)
def test_going_back_reads_the_same_again(name: str) -> None:
    train = loaders(LOADERS[name]()).train
    whole = [next(train)[:, 0] for _ in range(7)]
    train.set_step(4)
    assert torch.equal(next(train)[:, 0], whole[4])


def test_the_first_pass_is_that_of_torch() -> None:
    wanted = [batch[:, 0] for batch in LOADERS["generator"]()]
    train = loaders(LOADERS["generator"]()).train
    assert all(torch.equal(next(train)[:, 0], batch) for batch in wanted)
