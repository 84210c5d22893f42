"""Streams that hold something of their own (a place, generators, a count, errors): read in one process or in a worker,
evaluated in between, stopped and gone on with, they give the same."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from colossus.data import Loaders, build_loaders

BATCH, SAMPLES = 8, 21
workers = pytest.mark.parametrize("num_workers", [0, 1])


def loaders(data: Any, rank: int = 0, size: int = 1) -> Loaders:
    return build_loaders(data, seed=3, global_batch_size=BATCH, data_rank=rank, data_size=size)


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


class Kept(Place):
    """Not lost by set_epoch."""

    def set_epoch(self, epoch: int) -> None:
        pass


class Own(IterableDataset[Tensor]):
    """Shuffles by a generator of its own, and counts its passes."""

    def __init__(self) -> None:
        self.generator, self.passes = np.random.default_rng(0), 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        for index in self.generator.permutation(SAMPLES):
            yield torch.tensor([index, self.passes, random.random()], dtype=torch.float64)


class Reads:
    """Goes on behind errors."""

    def __init__(self, data: Failing) -> None:
        self.place, self.data = -1, data

    def __iter__(self) -> Reads:
        return self

    def __next__(self) -> Tensor:
        self.place += 1
        if self.place in self.data.broken:
            raise OSError(f"record {self.place}")
        if self.place == SAMPLES:
            raise StopIteration
        return torch.tensor([self.place, random.random()], dtype=torch.float64)


class Failing(IterableDataset[Tensor]):
    def __init__(self, *broken: int) -> None:
        self.broken = set(broken)

    def __iter__(self) -> Iterator[Tensor]:
        return Reads(self)


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def through_errors(train: Any, count: int) -> list[Any]:
    """So many batches and errors."""
    found: list[Any] = []
    for _ in range(count):
        try:
            found.append(next(train).tolist())
        except OSError as error:
            found.append(str(error).split("OSError: ")[-1].strip())
    return found


# -- evaluations ---------------------------------------------------------------------------------------------------


@workers
@pytest.mark.parametrize("kind", [Place, Kept, Own])
def test_every_evaluation_begins_at_the_start(kind: Callable[[], Any], num_workers: int) -> None:
    validation = loaders({"type": Numbers, "validation": {"type": kind, "num_workers": num_workers}}).validation
    assert validation is not None
    next(iter(validation))  # one that stops early
    first = [batch[:, 0].tolist() for batch in validation]
    assert sorted(number for batch in first for number in batch) == list(range(SAMPLES))
    for taken in (1, 2, 3):
        assert [batch[:, 0].tolist() for batch in islice(validation, taken)] == first[:taken]


@workers
def test_an_evaluation_behind_a_failed_one(num_workers: int) -> None:
    """Its first batch, too, is made of the first samples."""
    data = {"type": lambda: Failing(3), "num_workers": num_workers}
    validation = loaders({"type": Numbers, "validation": data}).validation
    assert validation is not None
    for _ in range(3):
        with pytest.raises(OSError, match="record 3"):
            list(validation)


def shared_generator() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    options = dict(batch_size=BATCH, generator=generator, shuffle=True)
    return {"type": DataLoader(Numbers(), **options), "validation": DataLoader(Numbers(), **options)}


def shared_stream() -> dict[str, Any]:
    data = Own()
    return {"type": data, "validation": data}


def shared_with_a_worker() -> dict[str, Any]:
    data = Own()
    return {"type": data, "validation": {"type": lambda: data, "num_workers": 1}}


@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("make", [shared_generator, shared_stream, shared_with_a_worker])
def test_evaluations_leave_the_generators_of_training_alone(make: Callable[[], Any], every: int) -> None:
    plain, evaluated, untrained = loaders(make()), loaders(make()), loaders(make()).validation
    assert evaluated.validation is not None
    assert untrained is not None
    evaluations = [[batch[:, 0].tolist() for batch in untrained]]
    for step in range(4 * every):
        assert next(plain.train)[:, 0].equal(next(evaluated.train)[:, 0])
        if step % every == every - 1:
            evaluations.append([batch[:, 0].tolist() for batch in evaluated.validation])
    assert evaluations == evaluations[:1] * 5
    resumed = loaders(make()).train
    resumed.load_state_dict(evaluated.train.state_dict())
    assert next(resumed)[:, 0].equal(next(plain.train)[:, 0])


def test_one_object_with_one_place_is_not_for_training_and_validation() -> None:
    data = Place()
    with pytest.raises(ValueError, match="and the training data are one Place, which keeps one place"):
        loaders({"type": data, "validation": data})


# -- one worker, and going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Place, Own, Failing])
def test_a_worker_reads_what_one_process_reads(kind: Callable[[], Any]) -> None:
    one, other = loaders(kind()).train, loaders({"type": kind, "num_workers": 1}).train
    assert rows(islice(one, 9)) == rows(islice(other, 9))  # into the fourth pass


@pytest.mark.parametrize("step", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("kind", [Place, Own])
def test_a_place_is_found_by_either(kind: Callable[[], Any], step: int) -> None:
    whole = rows(islice(loaders(kind()).train, step + 3))
    for before, after in ((0, 0), (0, 1), (1, 0), (1, 1)):
        first = loaders({"type": kind, "num_workers": before}).train
        list(islice(first, step))
        state = first.state_dict()
        list(islice(first, 1))  # what reads on changes nothing that was saved
        second = loaders({"type": kind, "num_workers": after}).train
        second.load_state_dict(state)
        found = rows(islice(second, 3))
        if kind is Own:  # its count is in no state
            assert [[row[0] for row in batch] for batch in found] == [[r[0] for r in batch] for batch in whole[step:]]
        else:
            assert found == whole[step:]
        second.set_step(0)
        assert [row[0] for row in rows([next(second)])[0]] == [row[0] for row in rows([next(loaders(kind()).train)])[0]]


@workers
@pytest.mark.parametrize("kind", [Place, Kept])
def test_training_goes_back_to_the_first_state(kind: Callable[[], Any], num_workers: int) -> None:
    train = loaders({"type": kind, "num_workers": num_workers}).train
    first = next(train)
    train.set_step(0)
    assert next(train).equal(first)


def test_what_iter_draws_it_draws_again_in_the_middle_of_a_pass() -> None:
    class Permuted(Place):
        def __iter__(self) -> Iterator[Tensor]:
            order = torch.randperm(SAMPLES)
            return (torch.stack([order[int(row[0])], row[2]]) for row in super().__iter__())

    whole = rows(islice(loaders(Permuted()).train, 6))
    first, second = loaders(Permuted()).train, loaders(Permuted()).train
    list(islice(first, 4))
    second.load_state_dict(first.state_dict())
    assert rows(islice(second, 2)) == whole[4:]


# -- errors, and ends ----------------------------------------------------------------------------------------------


@workers
def test_a_stream_goes_on_behind_an_error_and_from_there(num_workers: int) -> None:
    data = {"type": lambda: Failing(2, 11), "num_workers": num_workers}
    whole = through_errors(loaders(data).train, 7)
    assert whole == through_errors(loaders(Failing(2, 11)).train, 7)
    assert [each if isinstance(each, str) else [row[0] for row in each] for each in whole[:4]] == [
        "record 2",
        [3, 4, 5, 6, 7, 8, 9, 10],
        "record 11",
        [12, 13, 14, 15, 16, 17, 18, 19],
    ]
    for step in range(1, 6):
        first, second = loaders(data).train, loaders(data).train
        through_errors(first, step)
        state = first.state_dict()
        second.load_state_dict(state)
        assert through_errors(second, 7 - step) == whole[step:], step
        if step == 3:  # one that has healed is passed over, and one that the run did not meet is not
            healed = loaders(Failing(11)).train
            healed.load_state_dict(state)
            assert next(healed)[:, 0].tolist() == [12, 13, 14, 15, 16, 17, 18, 19]
            with pytest.raises(OSError, match="record 10"):
                loaders(Failing(2, 10, 11)).train.load_state_dict(state)


@workers
def test_batches_of_a_loader_behind_a_transient_error(num_workers: int) -> None:
    class Flaky(Numbers):
        fails = True

        def __getitem__(self, index: int) -> Tensor:
            if self.fails and index == BATCH + 4:
                raise OSError("once")
            return super().__getitem__(index)

    def make() -> DataLoader[Any]:
        return DataLoader(Flaky(), batch_size=BATCH, num_workers=num_workers)

    first = loaders(make()).train
    assert through_errors(first, 2)[1] == "once"
    Flaky.fails = False
    second = loaders(make()).train
    second.load_state_dict(first.state_dict())
    assert next(first)[0] == next(second)[0] == 2 * BATCH


@workers
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_left_of_data_that_cannot_start_over_is_dropped(size: int, num_workers: int) -> None:
    class Once(IterableDataset[Tensor]):
        place = 0

        def __iter__(self) -> Once:
            return self

        def __next__(self) -> Tensor:
            self.place += 1
            if self.place > 2 * BATCH + 2:
                raise StopIteration
            return torch.tensor([self.place])

    runs = [rows(loaders({"type": Once, "num_workers": num_workers}, rank, size).train) for rank in range(size)]
    assert [[len(batch) for batch in run] for run in runs] == [[BATCH // size] * 2] * size


@workers
def test_data_that_is_not_the_same_any_more(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"type": Own, "num_workers": num_workers}
    train = loaders(data).train
    next(train), next(train)
    state = train.state_dict()
    monkeypatch.setitem(globals(), "SAMPLES", 10)
    other = loaders(data).train
    words = "Own has less than 16 items in pass 0, but the run that goes on had read so many"
    if num_workers:
        other.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                next(other)
    else:
        with pytest.raises(ValueError, match=words):
            other.load_state_dict(state)


def test_a_pass_without_items_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Gap(Place):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([]) if self.epoch == 1 else iter(torch.zeros(BATCH, 1))

    assert len(list(loaders(Gap()).train)) == 1
    assert "Gap gave nothing in pass 1: the data ends" in caplog.text


def test_persistent_workers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    loaders(DataLoader(Numbers(), batch_size=BATCH, num_workers=1, persistent_workers=True))
    assert "DataLoader has persistent_workers: they see no set_epoch of the dataset" in caplog.text


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="colossus.data")
