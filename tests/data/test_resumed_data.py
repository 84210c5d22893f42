"""A run that goes on reads what the run that was not disturbed would have read: nothing twice, and nothing is left out,
also where workers persist, the batch is another one, or a state_dict says less than it should."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from helpers.datasets import BATCH, SAMPLES, Numbers, Stream, ids, loaders, same
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colossus.config.batch_sizes import BatchRamp

# -- workers that persist ---------------------------------------------------------------------------------------


class Counting(Numbers):
    """Its copy in a worker changes with each sample."""

    served = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.served += 1
        return {**super().__getitem__(index), "served": torch.tensor(self.served)}


def persistent(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH, persistent_workers=True, **{"num_workers": 1, **options})


@pytest.mark.parametrize(
    "make",
    [
        lambda: persistent(Counting(), shuffle=True),
        pytest.param(lambda: persistent(Stream()), marks=pytest.mark.long),  # set_epoch must reach the worker
        pytest.param(
            lambda: persistent(Numbers(), shuffle=True, num_workers=2, generator=torch.Generator()),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_pass_does_not_depend_on_those_before_it(make: Callable[[], Any]) -> None:
    whole = [*islice(loaders(make()).train, 9)]  # 3 batches a pass
    first = loaders(make())
    assert all(same(next(first.train), batch) for batch in whole[:5])
    second = loaders(make()).train
    second.load_state_dict(first.train.state_dict())
    assert all(same(next(second), batch) for batch in whole[5:])
    first.close()
    assert not [child for child in torch.multiprocessing.active_children() if "DataLoader" in child.name]


# -- another batch ----------------------------------------------------------------------------------------------


class Buffered(IterableDataset[Any]):
    """Shuffles through a buffer, by the global generator, sample by sample."""

    def __iter__(self) -> Iterator[Any]:
        buffer = [*range(8)]
        for index in range(8, SAMPLES):
            place = random.randrange(8)
            yield {"x": torch.tensor(buffer[place])}
            buffer[place] = index
        yield from ({"x": torch.tensor(index)} for index in buffer)


def endless(batch: int, make: Callable[[int], Any], steps: int) -> list[int]:
    train = loaders(make(batch), global_batch_size=batch).train
    return [number for batch in islice(train, steps) for number in ids(batch)]


def go_on(make: Callable[[int], Any], runs: list[tuple[int, int]], **options: Any) -> list[int]:
    """Return the numbers that runs of (batch, steps) read, each of which goes on with the one before."""
    seen, state = [], None
    for batch, steps in runs:
        train = loaders(make(batch), global_batch_size=batch, **options).train
        if state is not None:
            train.load_state_dict(state)
        seen += [number for batch in islice(train, steps) for number in ids(batch)]
        state = train.state_dict()
        assert state["samples"] == len(seen)
    return seen


@pytest.mark.parametrize(
    "runs", [[(8, 5), (16, 4)], [(16, 3), (6, 9)], [(8, 4), (4, 3), (28, 2)], [(7, 9), (7, 2), (29, 2)]]
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_samples_by_number_go_on_behind_those_that_were_read(workers: int, runs: list[tuple[int, int]]) -> None:
    def make(batch: int) -> Any:
        return {"type": Numbers(), "num_workers": workers}

    seen = go_on(make, runs)
    assert seen == endless(1, lambda _: Numbers(), len(seen))


def test_what_is_drawn_for_a_sample_is_the_same_behind_another_batch() -> None:
    def drawn(batches: Any) -> list[Any]:
        return [row for batch in batches for row in zip(*(kind.tolist() for kind in batch["noise"]), strict=True)]

    whole = drawn(islice(loaders(Numbers()).train, 9))
    first, second = loaders(Numbers()).train, loaders(Numbers(), global_batch_size=4).train
    assert drawn(islice(first, 5)) == whole[:40]
    second.load_state_dict(first.state_dict())
    assert drawn(islice(second, 8)) == whole[40:]


def test_another_ramp_and_a_way_back() -> None:
    order = endless(1, lambda _: Numbers(), 100)
    first = loaders(Numbers(), batch_ramp=BatchRamp(start=2, steps=6)).train
    seen = [number for batch in islice(first, 5) for number in ids(batch)]
    second = loaders(Numbers(), batch_ramp=BatchRamp(start=4, steps=8)).train
    second.load_state_dict(first.state_dict())
    later = [ids(batch) for batch in islice(second, 9)]
    seen += [number for batch in later for number in batch]
    assert seen == order[: len(seen)]
    second.set_step(7)
    assert ids(next(second)) == later[2]
    second.set_step(2)  # before the place where it went on: as a run that had this batch from the beginning
    assert ids(next(second)) == order[8:12]


@pytest.mark.parametrize("runs", [[(8, 2), (4, 3)], [(8, 5), (16, 3)], [(6, 3), (4, 2), (8, 4)]])
@pytest.mark.parametrize("kind", [Stream, Buffered])
def test_streams_go_on_behind_the_samples_that_were_read(kind: Callable[[], Any], runs: list[tuple[int, int]]) -> None:
    seen = go_on(lambda _: kind(), runs)
    for number in range(0, len(seen) - SAMPLES, SAMPLES):
        of_pass = seen[number : number + SAMPLES]
        assert sorted(x % 1000 for x in of_pass) == list(range(SAMPLES))
    last = seen[len(seen) // SAMPLES * SAMPLES :]
    assert len(set(last)) == len(last)
    if kind is Stream:
        assert seen == endless(1, lambda _: Stream(), len(seen))


@pytest.mark.parametrize(("runs", "again"), [([(4, 2), (8, 2)], 0), ([(8, 2), (4, 3)], 0), ([(4, 3), (8, 2)], 4)])
def test_a_dataloader_of_another_batch_goes_on_in_its_permutation(
    runs: list[tuple[int, int]], again: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make(batch: int) -> Any:
        return DataLoader(Numbers(), batch_size=batch, shuffle=True)

    seen = go_on(make, runs)
    whole = endless(4, make, 7)
    first = sum(batch * steps for batch, steps in runs[:1])
    assert seen == whole[:first] + whole[first - again : len(seen) - again]
    assert (f"{again} samples are read again" in caplog.text) == bool(again)


def test_data_of_another_kind_goes_on_behind_as_many_samples() -> None:
    first = loaders(Numbers(), global_batch_size=4).train
    assert [next(first) for _ in range(5)]
    second = loaders(Stream()).train
    second.load_state_dict(first.state_dict())
    assert second.step == 5
    assert ids(next(second)) == [*range(16, 24)]  # 2 whole batches of the 20 samples
    third = loaders(Numbers(), global_batch_size=4).train
    third.load_state_dict(second.state_dict())
    assert ids(next(third)) == endless(1, lambda _: Numbers(), 32)[28:]


# -- a state that leaves samples out ------------------------------------------------------------------------------


class BufferShuffledExamplesIterable(IterableDataset[Any]):
    """A part of ``datasets``: its state is the place in what it reads, without the buffer."""

    def __init__(self, seed: int) -> None:
        self.rng, self.place = random.Random(seed), 0

    def __iter__(self) -> Iterator[Any]:
        buffer, rng = [], random.Random(self.rng.random())
        while self.place < SAMPLES:
            buffer.append(self.place)
            self.place += 1
            if len(buffer) == 10:
                yield {"x": torch.tensor(buffer.pop(rng.randrange(10)))}
        yield from ({"x": torch.tensor(index)} for index in buffer)
        self.place = 0


class Streamed(IterableDataset[Any]):
    """A stream of ``datasets``."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self) -> None:
        self._ex_iterable: Any = BufferShuffledExamplesIterable(3)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._ex_iterable = BufferShuffledExamplesIterable(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ex_iterable)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._ex_iterable.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ex_iterable.place = state["place"]


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: DataLoader(data, batch_size=BATCH)])
@pytest.mark.parametrize("step", [2, 5])
def test_a_shuffle_buffer_is_filled_as_it_was(
    step: int, wrap: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    whole = [ids(batch) for batch in islice(loaders(wrap(Streamed())).train, step + 3)]
    first = loaders(wrap(Streamed())).train
    assert [ids(next(first)) for _ in range(step)] == whole[:step]
    second = loaders(wrap(Streamed())).train
    second.load_state_dict(first.state_dict())
    assert [ids(batch) for batch in islice(second, 3)] == whole[step:]
    assert "has a shuffle buffer, which its state_dict leaves out: reading" in caplog.text


# -- what workers share out ---------------------------------------------------------------------------------------


class SharedOut(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return ({"x": torch.tensor(index)} for index in range(worker.id, self.count, worker.num_workers))


def by_workers(count: int, workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(SharedOut(count), batch_size=BATCH, num_workers=workers, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    ("count", "workers"),
    [(44, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((45, 2), (40, 2), (50, 3), (9, 1), (31, 3)))],
)
def test_the_last_batches_of_workers_are_dropped_in_training_and_taken_in_validation(count: int, workers: int) -> None:
    validation = loaders({"type": Numbers, "validation": by_workers(count, workers)}).validation
    assert validation is not None
    for _ in range(2):
        assert sorted(number for batch in validation for number in ids(batch)) == list(range(count))
    plain = [ids(batch) for batch in by_workers(count, workers, drop_last=True)]
    train = loaders(by_workers(count, workers)).train
    assert [ids(batch) for batch in islice(train, 2 * len(plain))] == 2 * plain


@pytest.mark.long
def test_workers_none_of_which_has_a_batch() -> None:
    for count in (1, 9):
        with pytest.raises(ValueError, match=r"gives batches of \d samples, but train.global_batch_size = 8"):
            next(loaders(by_workers(count)).train)


@pytest.mark.long
def test_workers_whose_collate_fn_drops_samples() -> None:
    def five(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples[:5])

    with pytest.raises(ValueError, match="gives batches of 5 samples"):
        next(loaders(by_workers(44, collate_fn=five)).train)
