"""Data ranks read the same data, or are told otherwise; what is augmented at random is not taken for other data. And a
run that goes on with batches of its own is told where they begin."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.resumed import Listener, Vectors, engine_of, load, saved, settings
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from colossus.data import BatchedDataset

SAMPLES = 32


def sample(number: int) -> dict[str, Tensor]:
    return Vectors()[number]


class Mapped(Dataset[Any]):
    """Samples in an order, which ``change`` makes others; it draws from a generator of its own."""

    def __init__(self, order: Any, change: Callable[[Any, random.Random], Any] = lambda x, _: x, seed: int = 0) -> None:
        self.order, self.change, self.rng = [*order], change, random.Random(seed)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return self.change(sample(self.order[index]), self.rng)


class Streamed(Mapped, IterableDataset[Any]):  # type: ignore[misc]
    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return (self.change(sample(number), self.rng) for number in self.order)


class WithState(Streamed):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class AtOnce(BatchedDataset):
    def __init__(self, order: Any) -> None:
        self.order = np.array(order)

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return torch.utils.data.default_collate([sample(number) for number in self.order[indices].tolist()])


class Batches:
    def __init__(self, order: Any) -> None:
        self.order = [*order]

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self.order), 8):
            yield AtOnce(self.order).batch(np.arange(first, first + 8))


def noisy(x: Any, rng: random.Random) -> Any:
    return {**x, "inputs": x["inputs"] + rng.random()}


def alone(x: Any, rng: random.Random) -> Any:
    """No label, and a mask that says nothing."""
    return {"inputs": x["inputs"] + rng.random(), "labels": torch.tensor(1), "mask": [1, 1]}


def by_rank(rank: int) -> Any:
    return lambda x, _: {**x, "inputs": x["inputs"] + rank}


def order_of(rank: int) -> list[int]:
    return random.Random(rank).sample(range(SAMPLES), SAMPLES)


def split(rank: int) -> list[int]:
    return [*range(rank, SAMPLES, 2)] * 2


def loader(data: Any, **options: Any) -> Any:
    return DataLoader(data, **{"batch_size": 8, **options})


def of_rank(data: Any) -> Any:
    return dict(type=lambda: data, per_rank=True)


def distributed(rank: int) -> Any:
    return loader(Vectors(), batch_size=4, sampler=DistributedSampler(Vectors(), num_replicas=2, rank=rank))


whole = range(SAMPLES)
SHARED_OUT, OTHER_ORDER, WARNED = "is divided among ranks already", "has other samples by the same numbers", "warned"

#: what a data rank reads, and what is told
Cases = dict[str, tuple[Callable[[int], Any], str]]

CASES: Cases = {
    "stream by rank": (lambda rank: Streamed(split(rank)), SHARED_OUT),
    "sampler by rank": (lambda rank: loader(Vectors(), sampler=split(rank)), SHARED_OUT),
    "lengths": (lambda rank: Mapped(range(SAMPLES - rank)), "32 on data rank 0; 31 on data rank 1"),
    "order": (lambda rank: Mapped(order_of(rank)), OTHER_ORDER),
    "augmented in another order": (lambda rank: Mapped(order_of(rank), noisy, rank), OTHER_ORDER),
    "validation": (lambda rank: dict(type=Vectors, validation=Streamed(split(rank))), SHARED_OUT),
    "per_rank, the same": (lambda rank: of_rank(Streamed(whole)), "yields the same samples on data ranks 0, 1"),
    "augmented": (lambda rank: Mapped(whole, noisy, rank), ""),
    "augmented stream": (lambda rank: Streamed(whole, noisy, rank), ""),
    "without labels": (lambda rank: Mapped(whole, alone, rank), WARNED),
    "loader without labels": (lambda rank: loader(Mapped(whole, alone, rank), shuffle=True), WARNED),
    "distributed": (distributed, ""),
}

MORE_CASES: Cases = {
    "generator by rank": (lambda rank: iter(Batches(split(rank))), SHARED_OUT),
    "stream with state by rank": (lambda rank: WithState(split(rank)), SHARED_OUT),
    "batches by rank": (lambda rank: Batches(split(rank)), SHARED_OUT),
    "loader of a stream by rank": (lambda rank: loader(Streamed(split(rank))), SHARED_OUT),
    "order of a rank's own": (lambda rank: loader(Vectors(), sampler=order_of(rank)), SHARED_OUT),
    "augmented stream by rank": (lambda rank: Streamed(split(rank), noisy, rank), SHARED_OUT),
    "half of a map": (lambda rank: Mapped(range(16 * rank, 16 * rank + 16)), OTHER_ORDER),
    "batched in another order": (lambda rank: AtOnce(order_of(rank)), OTHER_ORDER),
    "lengths of validation": (
        lambda rank: dict(type=Vectors, validation=Mapped(range(15 + rank))),
        "data.validation: Mapped has another number",
    ),
    "map": (lambda rank: Mapped(whole), ""),
    "augmented by rank and number": (lambda rank: Mapped(whole, by_rank(rank)), ""),
    "augmented loader": (lambda rank: loader(Mapped(whole, noisy, rank), shuffle=True), ""),
    "stream without labels": (lambda rank: Streamed(whole, alone, rank), WARNED),
    "loader of a stream without labels": (lambda rank: loader(Streamed(whole, alone, rank)), WARNED),
    "batched": (lambda rank: AtOnce(whole), ""),
    "per_rank": (lambda rank: of_rank(Streamed(split(rank))), ""),
    "all alike": (lambda rank: Streamed([3] * SAMPLES), ""),
}  # fmt: skip

WITH_WORKERS: Cases = {
    "order": (lambda rank: dict(type=Mapped, order=order_of(rank), num_workers=2), OTHER_ORDER),
    "augmented": (lambda rank: dict(type=Mapped, order=whole, change=noisy, seed=rank, num_workers=1), ""),
    "without labels": (lambda rank: dict(type=Mapped, order=whole, change=alone, seed=rank, num_workers=1), WARNED),
    "loader by rank": (lambda rank: loader(Vectors(), sampler=split(rank), num_workers=2), SHARED_OUT),
    "loader of a stream by rank": (lambda rank: loader(Streamed(split(rank)), num_workers=1), SHARED_OUT),
    "loader without labels": (lambda rank: loader(Mapped(whole, alone, rank), num_workers=1), WARNED),
    "loader of a stream without labels": (lambda rank: loader(Streamed(whole, alone, rank), num_workers=1), WARNED),
}


def refusals(rank: int, cases: Cases, strategy: str, folder: Path) -> dict[str, Any]:
    """Return what is refused on a rank, and what is logged."""
    listener, words = Listener(), {}
    logging.getLogger("colossus").addHandler(listener)
    for name, (make, _) in cases.items():
        listener.told.clear()
        engine = engine_of(settings(folder, dict(data=2, strategy=dict(type=strategy))), make(rank))
        error = ""
        try:
            for _ in range(2):
                engine.train_step(next(engine.loader))
            if engine.eval_loader is not None or strategy != "all_reduce":
                engine.evaluate()
        except ValueError as refused:
            error = str(refused)
        engine.close()
        words[name] = error, [*listener.told]
    return words


def require(cases: Cases, strategy: str, folder: Path) -> None:
    ranks = run_ranks(2, refusals, cases, strategy, folder, with_context=False)
    for name, (_, wanted) in cases.items():
        errors, logged = {ranks[0][name][0], ranks[1][name][0]}, [ranks[rank][name][1] for rank in (0, 1)]
        assert len(errors) == 1, (name, errors)
        if wanted == WARNED:
            assert errors == {""}, (name, errors)
            assert "This is only a warning" in logged[0][0], name
            assert logged[1] == [], name
        else:
            assert logged == [[], []], (name, logged)
            assert wanted in errors.pop() if wanted else errors == {""}, (name, wanted, errors)


@pytest.mark.parametrize(
    "cases", [CASES, *(pytest.param(cases, marks=pytest.mark.long) for cases in (MORE_CASES, WITH_WORKERS))]
)
def test_data_ranks_read_the_same_data(cases: Cases, tmp_path: Path) -> None:
    require(cases, "all_reduce", tmp_path)


@pytest.mark.long
def test_replicas_that_do_not_wait_are_told_at_an_evaluation(tmp_path: Path) -> None:
    validation = {"validation": Mapped(whole)}
    cases: dict[str, Any] = {
        "stream by rank": (lambda rank: dict(type=lambda: Streamed(split(rank)), **validation), SHARED_OUT),
        "map": (lambda rank: dict(type=Vectors, **validation), ""),
    }
    require(cases, "sgp", tmp_path)


# -- batches of one's own -----------------------------------------------------------------------------------------


def own_loop(engine: Any) -> None:
    for batch in DataLoader(Vectors(), batch_size=8 // engine.context.size("data")):
        engine.train_step(batch)
        break


def own_loader(engine: Any) -> None:
    for _ in range(2):
        engine.train_step(next(engine.loader))
    own_loop(engine)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_that_goes_on_with_batches_of_its_own_is_told(world: int, tmp_path: Path) -> None:
    parallel = dict(data=world)
    path = saved(tmp_path, world=world, parallel=parallel)
    for look, words in (
        (own_loop, "after step 2, but the batch of step 3 is not from engine.loader"),
        (own_loader, ""),
    ):
        ranks = load(path, settings(tmp_path / "other", parallel), look, world=world)
        assert [len(lines) for _, lines, _ in ranks] == [bool(words)] + [0] * (world - 1)
        assert not words or words in ranks[0][1][0]
