"""Data that is read from the front: streams of samples and ready batches, evaluated in between,
stopped and gone on with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from helpers.datasets import BATCH, Batches, Numbers, Remembering, Stream, ids, loaders, same, shuffled
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

SAMPLES = 21


def rows(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


class Place(IterableDataset[Tensor]):
    """Saves its place, in one dict that reading changes. It is lost by set_epoch."""

    epoch = -1

    def __init__(self) -> None:
        self.state = {"place": 0}

    def set_epoch(self, epoch: int) -> None:
        self.state["place"], self.epoch = 0, epoch

    def __iter__(self) -> Iterator[Tensor]:
        while self.state["place"] < SAMPLES:
            self.state["place"] += 1
            yield torch.tensor([self.state["place"] - 1, self.epoch, random.random()], dtype=torch.float64)
        self.state["place"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Drawing(IterableDataset[Tensor]):
    """Shuffles and augments by the global generators, and knows no place."""

    def __iter__(self) -> Iterator[Tensor]:
        left = torch.randperm(SAMPLES).tolist()
        while left:
            index = left.pop(random.randrange(len(left)))
            yield torch.tensor([index, 0, random.random()], dtype=torch.float64)


# -- streams of samples -----------------------------------------------------------------------------------------


def test_a_batch_is_filled_from_the_next_pass() -> None:
    batches = [ids(batch) for batch in islice(loaders(Stream()).train, 4)]
    assert batches[0] == list(range(8))
    assert batches[3] == [24, 25, 26, 27, 28, 1000, 1001, 1002]  # and set_epoch(1) was called


@pytest.mark.parametrize(
    ("wrap", "read"),
    [
        (lambda data: data, 8),  # 5 that are left of 29 and 3 of the next pass
        (lambda data: DataLoader(data, batch_size=BATCH), 13),  # the short batch of 5 is dropped
    ],
    ids=["dataset", "loader"],
)
def test_the_users_own_state_is_used_instead_of_reading(wrap: Callable[[Any], Any], read: int) -> None:
    first = loaders(wrap(Remembering())).train
    for _ in range(3):
        next(first)
    data = Remembering()
    second = loaders(wrap(data)).train
    second.load_state_dict(first.state_dict())
    assert data.served == 0
    assert same(next(second), next(first))
    assert data.served == read


# -- DataLoaders and other ready batches --------------------------------------------------------------------------


def test_a_distributed_sampler_gives_each_rank_its_part_and_is_told_the_epoch() -> None:
    def make(rank: int) -> DataLoader[Any]:
        data = TensorDataset(torch.arange(32))
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=rank)
        return DataLoader(data, batch_size=4, sampler=sampler)

    runs = [[b[0].tolist() for b in islice(loaders(make(rank), rank, 2).train, 8)] for rank in (0, 1)]
    for epoch in (0, 1):
        seen = [i for run in runs for batch in run[4 * epoch : 4 * epoch + 4] for i in batch]
        assert sorted(seen) == list(range(32))
    assert runs[0][:4] != runs[0][4:]  # set_epoch turned the shuffle


def test_batches_of_a_rank_are_taken_whole_where_the_data_says_so() -> None:
    assert ids(next(loaders({"type": Batches(4), "per_rank": True}, 1, 2).train)) == [0, 1, 2, 3]
    assert ids(next(loaders({"type": lambda: shuffled(4), "per_rank": True}, 1, 2).train))
    assert ids(next(loaders(Batches(8), 1, 2).train)) == [4, 5, 6, 7]


def test_batches_of_a_wrong_size() -> None:
    """Those of a DataLoader are refused at once: of its part, all data ranks would train on the same samples."""
    words = r"batches of {} samples, but train.global_batch_size = 8 over 2 data ranks.*takes its 4.*DistributedSampler"
    for size in (4, 6):
        with pytest.raises(ValueError, match=words.format(size)):
            loaders(shuffled(size), 0, 2)
        with pytest.raises(ValueError, match=words.format(size)):
            next(loaders(Batches(size), 0, 2).train)
    with pytest.raises(ValueError, match=r"batches of 6 samples, but train.global_batch_size = 8: set one of them"):
        loaders(shuffled(6))


def test_only_the_last_batch_of_a_pass_may_be_short() -> None:
    class Sizes(Batches):
        sizes = (8, 8, 5)

        def __iter__(self) -> Iterator[Any]:
            return iter([{"x": torch.arange(size)} for size in self.sizes])

    assert [len(ids(batch)) for batch in islice(loaders(Sizes()).train, 5)] == [8] * 5
    Sizes.sizes = (8, 5, 8)
    train = loaders(Sizes()).train
    next(train)
    with pytest.raises(ValueError, match="batches of 5 samples"):
        next(train)


# -- evaluations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Place, Drawing])
def test_every_evaluation_begins_at_the_start(kind: Callable[[], Any]) -> None:
    validation = loaders({"type": Numbers, "validation": {"type": kind}}).validation
    assert validation is not None
    next(iter(validation))  # one that stops early
    first = rows(validation)
    assert sorted(row[0] for batch in first for row in batch) == list(range(SAMPLES))
    for taken in (1, 2, 3):
        assert rows(islice(validation, taken)) == first[:taken]


def test_one_object_with_one_place_is_not_for_training_and_validation() -> None:
    data = Place()
    with pytest.raises(ValueError, match="and the training data are one Place, whose state_dict has a single"):
        loaders({"type": data, "validation": data})


# -- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Place, Drawing])
def test_a_place_is_found_again(kind: Callable[[], Any]) -> None:
    for step in (0, 1, 2, 3, 7):
        whole = rows(islice(loaders(kind()).train, step + 3))
        first = loaders(kind()).train
        assert rows(islice(first, step)) == whole[:step]
        state = first.state_dict()
        next(first)  # what reads on changes nothing that was saved
        second = loaders(kind()).train
        second.load_state_dict(state)
        assert rows(islice(second, 3)) == whole[step:]
        second.set_step(0)
        assert rows([next(second)]) == rows([next(loaders(kind()).train)])


def test_data_of_each_data_rank_is_taken_whole() -> None:
    """An IterableDataset that gives a data rank its own samples, and says so."""

    class Own(IterableDataset[Tensor]):
        def __init__(self, data_rank: int, data_size: int) -> None:
            self.numbers = range(data_rank, SAMPLES, data_size)

        def __iter__(self) -> Iterator[Tensor]:
            return iter(map(torch.tensor, self.numbers))

    data = {"type": Own, "per_rank": True}
    runs = [rows(islice(loaders({**data, "validation": data}, rank, 2).train, 3)) for rank in (0, 1)]
    assert runs[0] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 0]]
    assert runs[1] == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 1, 3]]
    held = [rows(loaders({"type": Numbers, "validation": data}, rank, 2).validation) for rank in (0, 1)]
    seen = [[number for batch in run for number in batch] for run in held]
    assert seen == [list(range(0, SAMPLES, 2)), list(range(1, SAMPLES, 2))]


# -- errors, and ends ----------------------------------------------------------------------------------------------


def test_data_that_is_not_the_same_any_more(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    train = loaders(Drawing()).train
    next(train), next(train)
    monkeypatch.setitem(globals(), "SAMPLES", 10)
    with pytest.raises(ValueError, match="Drawing has less than the 16 items that the run had read of pass 0"):
        loaders(Drawing()).train.load_state_dict(train.state_dict())
    assert "Drawing has no state_dict: reading 16 items of pass 0 again" in caplog.text
