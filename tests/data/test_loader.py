"""What the engine reads: order, slices, resume, for each kind of data a user may bring."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from colossus.config.section import Named
from colossus.data import BatchedDataset, Loaders, build_loaders
from colossus.registry import DATASETS

BATCH = 8
SAMPLES = 29  # odd on purpose: batches straddle epochs


def loaders(data: Any, rank: int = 0, size: int = 1, **options: Any) -> Loaders:
    return build_loaders(
        data, **{"seed": 3, "global_batch_size": BATCH, "data_rank": rank, "data_size": size, **options}
    )


def ids(batch: Any) -> list[int]:
    """The sample numbers, which all data of this file carries as ``x``."""
    return [int(value) for value in batch["x"]]


class Numbers(Dataset[Any]):
    """Sample ``i`` is ``i`` and one draw from each global generator."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert type(index) is int
        if not 0 <= index < self.count:
            raise IndexError
        return {"x": torch.tensor(index), "noise": [torch.rand(()), random.random(), np.random.rand()]}


class Stream(IterableDataset[Any]):
    """0, 1, ... in each pass, the numbers of pass ``e`` 1000 e higher."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield {"x": torch.tensor(index + 1000 * self.epoch)}


class Remembering(Stream):
    """A stream that saves its place itself; ``served`` tells how much it has read."""

    def __init__(self, count: int = SAMPLES) -> None:
        super().__init__(count)
        self.place = 0
        self.served = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.count:
            self.place += 1
            self.served += 1
            yield {"x": torch.tensor(self.place - 1)}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Batches:
    """An iterable of ready batches of ``size``."""

    def __init__(self, size: int = BATCH, count: int = 5) -> None:
        self.size, self.count = size, count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield {"x": np.arange(self.size) + number * self.size}


def shuffled(size: int = BATCH, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=size, shuffle=True, num_workers=workers)


KINDS: dict[str, Callable[[], Any]] = {
    "map": Numbers,
    "list": lambda: [{"x": torch.tensor(i)} for i in range(SAMPLES)],
    "stdlib": lambda: {"type": "PythonStdlib", "seq_len": 16, "max_bytes": 8000},
    "stream": Stream,
    "remembering": Remembering,
    "loader": shuffled,
    "loader of stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "loader of remembering": lambda: DataLoader(Remembering(), batch_size=BATCH),
    "batches": Batches,
    "callable": lambda: lambda seed: Numbers(SAMPLES + seed),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(torch.equal(left, right))


def joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], list):
        return [joined(list(values)) for values in zip(*parts, strict=True)]
    return torch.cat(parts)


# Laws that hold for every kind of data


@kinds
@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_the_data_ranks_are_the_batch_of_one_process(make: Callable[[], Any], size: int) -> None:
    """Also the random numbers that the dataset draws belong to the place in the global batch."""
    whole = islice(loaders(make()).train, 9)
    ranks = [islice(loaders(make(), rank, size).train, 9) for rank in range(size)]
    for step, (batch, *parts) in enumerate(zip(whole, *ranks, strict=True)):
        if "noise" in batch and make is KINDS["loader"]:
            batch.pop("noise"), [part.pop("noise") for part in parts]  # drawn per batch, alike on all ranks
        assert same(joined(parts), batch), step


@kinds
def test_every_rank_of_a_model_gets_the_same_whatever_it_drew_before(make: Callable[[], Any]) -> None:
    one, other = loaders(make()).train, loaders(make()).train
    for _ in range(9):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        left = next(one)
        torch.manual_seed(2), random.seed(2), np.random.seed(2)
        assert same(left, next(other))


@kinds
def test_reading_leaves_the_global_generators_alone(make: Callable[[], Any]) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    train = loaders(make()).train
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = draw()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    next(train)
    assert draw() == expected


@kinds
@pytest.mark.parametrize("step", [0, 1, 3, 4, 11])
def test_set_step_continues_the_run_from_zero(make: Callable[[], Any], step: int) -> None:
    run = list(islice(loaders(make()).train, step + 4))
    train = loaders(make()).train
    train.set_step(step)
    assert train.step == step
    for expected in run[step:]:
        assert same(next(train), expected)
    assert train.step == step + 4


@kinds
@pytest.mark.parametrize("step", [0, 3, 4, 11])
def test_state_continues_the_run(make: Callable[[], Any], step: int) -> None:
    first = loaders(make()).train
    for _ in range(step):
        next(first)
    state = first.state_dict()
    expected = [next(first) for _ in range(6)]
    second = loaders(make()).train
    second.load_state_dict(state)
    assert second.step == step
    for batch in expected:
        assert same(next(second), batch)


@pytest.mark.parametrize("make", [KINDS["map"], KINDS["stream"], KINDS["loader"]], ids=["map", "stream", "loader"])
def test_set_step_goes_back_too(make: Callable[[], Any]) -> None:
    train = loaders(make()).train
    run = [next(train) for _ in range(7)]
    train.set_step(2)
    assert all(same(next(train), batch) for batch in run[2:])
    with pytest.raises(ValueError, match="step = -1"):
        train.set_step(-1)


@kinds
@pytest.mark.parametrize("step", [0, 3])
def test_a_look_at_the_next_batch_takes_nothing(make: Callable[[], Any], step: int) -> None:
    run = list(islice(loaders(make()).train, step + 3))
    train = loaders(make()).train
    for _ in range(step):
        next(train)
    assert same(train.peek(), run[step])
    assert same(train.peek(), run[step])
    assert train.step == step
    state = train.state_dict()
    assert same(next(train), run[step])
    assert train.step == step + 1
    assert same(next(train), run[step + 1])
    assert same(train.peek(), run[step + 2])
    resumed = loaders(make()).train
    resumed.peek()
    resumed.load_state_dict(state)
    assert resumed.step == step
    for expected in run[step:]:
        assert same(next(resumed), expected)


def test_set_step_drops_what_was_looked_at() -> None:
    train = loaders(Numbers()).train
    run = list(islice(loaders(Numbers()).train, 4))
    train.peek()
    train.set_step(2)
    assert train.step == 2
    assert same(train.peek(), run[2])
    train.set_step(2)  # it is the next one still
    assert same(next(train), run[2])
    assert same(next(train), run[3])
    ended = loaders(iter(list(Batches(count=1)))).train
    next(ended)
    with pytest.raises(StopIteration):
        ended.peek()


def test_epochs_visit_every_sample_once_and_differ() -> None:
    train = loaders(Numbers()).train
    seen = [i for batch in islice(train, SAMPLES) for i in ids(batch)]  # SAMPLES * BATCH samples are BATCH epochs
    epochs = [seen[start : start + SAMPLES] for start in range(0, len(seen), SAMPLES)]
    assert len(epochs) == BATCH
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == BATCH


def test_another_seed_is_another_order() -> None:
    assert ids(next(loaders(Numbers(), seed=3).train)) != ids(next(loaders(Numbers(), seed=4).train))
    assert ids(next(loaders(shuffled(), seed=3).train)) != ids(next(loaders(shuffled(), seed=4).train))


def test_iterating_again_goes_on() -> None:
    train = loaders(Stream()).train
    for batch in train:
        assert ids(batch) == list(range(8))
        break
    for batch in train:
        assert ids(batch) == list(range(8, 16))
        break


# Map-style datasets


def test_workers_read_the_same_as_the_main_process() -> None:
    plain = loaders(Numbers()).train
    workers = loaders({"type": Numbers, "num_workers": 1}).train
    for _ in range(5):
        assert same(next(plain), next(workers))
    workers.set_step(2)
    plain.set_step(2)
    assert same(next(plain), next(workers))


class Flaky(Numbers):
    """Sample 13 cannot be read, once in all processes, while there is a ``marker``."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13 and self.marker.exists():
            self.marker.unlink()
            raise OSError("not now")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_that_could_not_be_read_is_read_again(workers: int, tmp_path: Path) -> None:
    # A marker each: training's workers still read ahead while validation is read.
    markers = tmp_path / "train", tmp_path / "validation"
    for marker in markers:
        marker.touch()
    sound, flaky = (
        loaders({"type": lambda: train, "num_workers": workers, "validation": validation})
        for train, validation in ((Numbers(), Numbers()), map(Flaky, markers))
    )
    errors, step = 0, 0
    while step < 6:
        try:
            batch = next(flaky.train)
        except OSError:
            errors += 1
            continue
        assert same(batch, next(sound.train))
        step += 1
        assert flaky.train.step == step
    assert errors == 1
    assert flaky.validation is not None
    assert sound.validation is not None
    with pytest.raises(OSError, match="not now"):
        list(flaky.validation)
    assert list(map(ids, flaky.validation)) == list(map(ids, sound.validation))


@pytest.mark.parametrize("make", [Numbers, Stream])
def test_workers_go_when_the_loader_goes(make: Callable[[], Any]) -> None:
    """A reference cycle would leave them to the garbage collector, which takes 5 s over each."""
    before = torch.multiprocessing.active_children()
    train = loaders({"type": make, "num_workers": 1}).train
    next(train)
    (worker,) = [child for child in torch.multiprocessing.active_children() if child not in before]
    gc.disable()
    try:
        del train
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_collate_and_getitems() -> None:
    class Many(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [index * 2 for index in indices]

    plain = ids(next(loaders(Numbers()).train))
    batch = next(loaders({"type": Many, "collate_fn": lambda samples: {"x": torch.tensor(samples)}}).train)
    assert ids(batch) == [2 * index for index in plain]


def test_a_method_called_batch_is_the_users_own() -> None:
    class Named(Numbers):
        def batch(self, batch_size: int) -> None:
            raise AssertionError("not for us")

    assert len(ids(next(loaders(Named()).train))) == BATCH


def test_a_changed_seed_or_data_is_told_on_resume(caplog: pytest.LogCaptureFixture) -> None:
    state = loaders(Numbers()).train.state_dict()
    loaders(Numbers()).train.load_state_dict(state)
    assert not caplog.records
    loaders(Numbers(SAMPLES + 1), seed=4).train.load_state_dict(state)
    assert "seed was 3 when the checkpoint was written and is 4 now" in caplog.text
    assert "num_samples was 29 when the checkpoint was written and is 30 now" in caplog.text


# Streams of samples


def test_a_batch_is_filled_from_the_next_pass() -> None:
    batches = [ids(batch) for batch in islice(loaders(Stream()).train, 4)]
    assert batches[0] == list(range(8))
    assert batches[3] == [24, 25, 26, 27, 28, 1000, 1001, 1002]  # and set_epoch(1) was called


def test_a_stream_with_one_worker() -> None:
    plain, worker = loaders(Stream()).train, loaders({"type": Stream, "num_workers": 1}).train
    for _ in range(5):
        assert same(next(plain), next(worker))


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


def test_a_stateful_loader_is_asked_before_its_dataset() -> None:
    class StatefulLoader(DataLoader[Any]):
        loaded: Any = None

        def state_dict(self) -> dict[str, str]:
            return {"mine": "yes"}

        def load_state_dict(self, state: dict[str, str]) -> None:
            self.loaded = state

    def make() -> StatefulLoader:
        return StatefulLoader(Remembering(), batch_size=BATCH)

    first = loaders(make()).train
    next(first)
    user = make()
    second = loaders(user).train
    second.load_state_dict(first.state_dict())
    next(second)
    assert user.loaded == {"mine": "yes"}


def test_reading_up_to_a_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loaders(Stream()).train.set_step(2)
    assert "Stream cannot seek: reading 2 batches to reach step 2" in caplog.text
    train = loaders(Stream()).train
    for _ in range(5):
        next(train)
    loaders(Stream()).train.load_state_dict(train.state_dict())
    assert "Stream has no state_dict: reading 11 items of pass 1 again" in caplog.text


def test_an_empty_stream() -> None:
    with pytest.raises(ValueError, match="Stream gave nothing: the data is empty"):
        next(loaders(Stream(0)).train)


# DataLoaders and other ready batches


def test_a_loader_is_taken_as_it_is() -> None:
    """Its own collate, its own order; a short batch at the end of a pass is dropped, as with drop_last."""
    data = DataLoader(Numbers(), batch_size=BATCH, collate_fn=lambda samples: {"x": [s["x"] for s in samples][::-1]})
    data.collate_fn = lambda samples: {"x": torch.stack([sample["x"] for sample in samples]).flip(0)}
    batches = [ids(batch) for batch in islice(loaders(data).train, 4)]
    assert batches == [list(range(s + 7, s - 1, -1)) for s in (0, 8, 16, 0)]


def test_a_loader_with_a_worker() -> None:
    one, two = loaders(shuffled(workers=1)).train, loaders(shuffled(workers=1)).train
    two.set_step(2)
    run = list(islice(one, 4))
    assert same(next(two), run[2])
    assert ids(run[2]) == ids(list(islice(loaders(shuffled()).train, 3))[2])


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


def test_a_distributed_sampler_for_other_ranks() -> None:
    data = TensorDataset(torch.arange(32))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=4, rank=1))
    with pytest.raises(
        ValueError, match=r"num_replicas=4, rank=1, but this process is data rank 0 of 2.*num_replicas=2"
    ):
        loaders(loader, 0, 2)
    with pytest.raises(ValueError, match="data rank 0 of 1"):
        loaders(loader)


def test_a_sampler_that_knows_no_ranks_must_not_give_parts() -> None:
    """All data ranks would train on the same samples, in silence."""
    with pytest.raises(ValueError, match=r"RandomSampler knows nothing of the 2 data ranks.*batch_size=8"):
        loaders(shuffled(4), 0, 2)
    said = loaders({"type": lambda: shuffled(4), "per_rank": True}, 0, 2).train
    assert len(ids(next(said))) == 4


def test_batches_of_a_rank_are_taken_whole() -> None:
    assert ids(next(loaders(Batches(4), 1, 2).train)) == [0, 1, 2, 3]
    assert ids(next(loaders(Batches(8), 1, 2).train)) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("size", "ranks", "words"),
    [
        (6, 1, r"batch of 6 samples, but train.global_batch_size = 8"),
        (6, 2, r"batch of 6 samples.*= 8 over 2 data ranks needs batches of 8 \(each .* 8 / 2 = 4\), or of 4"),
    ],
)
def test_batches_of_a_wrong_size(size: int, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(loaders(Batches(size), 0, ranks).train)


def test_only_the_last_batch_of_a_pass_may_be_short() -> None:
    class Sizes(Batches):
        sizes = (8, 8, 5)

        def __iter__(self) -> Iterator[Any]:
            return iter([{"x": torch.arange(size)} for size in self.sizes])

    assert [len(ids(batch)) for batch in islice(loaders(Sizes()).train, 5)] == [8] * 5
    Sizes.sizes = (8, 5, 8)
    train = loaders(Sizes()).train
    next(train)
    with pytest.raises(ValueError, match="batch of 5 samples"):
        next(train)


def test_a_short_batch_of_the_size_of_a_part_is_not_taken_for_one() -> None:
    data = DataLoader(Numbers(20), batch_size=BATCH)  # 8, 8, 4
    assert [ids(batch) for batch in islice(loaders(data, 1, 2).train, 3)] == [
        [4, 5, 6, 7], [12, 13, 14, 15], [4, 5, 6, 7],
    ]  # fmt: skip


def test_a_short_batch_right_after_a_resume_is_not_taken_for_a_part_either() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Remembering(20), batch_size=BATCH)

    first, second = loaders(make(), 1, 2).train, loaders(make(), 1, 2).train
    next(first), next(first)
    second.load_state_dict(first.state_dict())
    assert ids(next(second)) == ids(next(first)) == [4, 5, 6, 7]


def test_a_pass_with_nothing_but_a_short_batch() -> None:
    class Shrinking(Batches):
        def __iter__(self) -> Iterator[Any]:
            self.size, size = 5, self.size
            yield {"x": torch.arange(size)}

    train = loaders(Shrinking()).train
    next(train)
    with pytest.raises(ValueError, match="batch of 5 samples"):
        next(train)


def test_an_iterator_of_ones_own_ends_too() -> None:
    class Once:
        left = 3

        def __iter__(self) -> Once:
            return self

        def __next__(self) -> Any:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return {"x": torch.arange(BATCH)}

    train = loaders(Once()).train
    assert len(list(train)) == 3
    assert list(train) == []
    train.set_step(0)
    with pytest.raises(ValueError, match="already read to its end"):
        next(train)


def test_a_generator_ends() -> None:
    train = loaders(iter(list(Batches(count=3)))).train
    assert len(list(train)) == 3
    generator = (batch for batch in Batches(count=3))
    train = loaders(generator).train
    train.set_step(2)
    assert ids(next(train)) == list(range(16, 24))
    with pytest.raises(StopIteration):
        next(train)
    with pytest.raises(ValueError, match="generator is an iterator, which can be read once"):
        train.set_step(0)


# Validation


@pytest.mark.parametrize("size", [1, 2, 4])
def test_validation_is_the_same_each_time_and_in_order(size: int) -> None:
    built = [loaders({"type": Numbers, "validation": Numbers(27)}, rank, size).validation for rank in range(size)]
    parts = [part for part in built if part is not None]
    for _ in range(2):
        next(iter(parts[0]))  # an evaluation that stopped early
        runs = [list(part) for part in parts]
        assert [len(run) for run in runs] == [4] * size
        seen = [i for step in zip(*runs, strict=True) for part in step for i in ids(part)]
        assert seen == list(range(27))
        assert [len(ids(run[-1])) for run in runs] == {1: [3], 2: [1, 2], 4: [0, 1, 1, 1]}[size]  # 27 = 3 x 8 + 3
    assert [part.num_batches for part in parts] == [4] * size


def test_a_data_rank_without_a_sample_of_the_last_batch() -> None:
    """Its batch looks as others do, whatever a collate_fn or a dataset of batches would make of no samples."""

    class Whole(BatchedDataset):
        def __len__(self) -> int:
            return 9

        def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
            assert len(indices)
            return {"x": torch.as_tensor(indices)}

    def drawing(samples: list[Any]) -> Any:
        return {"x": torch.stack([sample["x"] for sample in samples]), "noise": torch.rand(len(samples))}

    for kind in ({"type": Whole}, {"type": Numbers, "count": 9, "collate_fn": drawing}):
        runs = [list(loaders({"type": Numbers, "validation": dict(kind)}, rank, 2).validation or ()) for rank in (0, 1)]
        assert [[ids(batch) for batch in run] for run in runs] == [[[0, 1, 2, 3], []], [[4, 5, 6, 7], [8]]]
        (whole,) = [list(loaders({"type": Numbers, "validation": dict(kind)}).validation or ())]
        for key in whole[0]:
            assert torch.cat([run[1][key] for run in runs]).equal(whole[1][key])


@pytest.mark.parametrize("make", [Stream, Batches, shuffled], ids=["stream", "batches", "shuffled loader"])
def test_validation_by_streams(make: Callable[[], Any]) -> None:
    runs = []
    for rank in (0, 1):
        validation = loaders({"type": Numbers, "validation": make()}, rank, 2).validation
        assert validation is not None
        assert validation.num_batches is None
        first, again = list(validation), list(validation)
        assert same(first, again)
        runs.append(first)
    whole = loaders({"type": Numbers, "validation": make()}).validation
    assert whole is not None
    assert [ids(b) for b in whole] == [ids(a) + ids(b) for a, b in zip(*runs, strict=True)]
    assert len(runs[0]) == (5 if make is Batches else 4)
    assert sum(len(ids(batch)) for batch in whole) == (40 if make is Batches else SAMPLES)


def test_validation_smaller_than_one_batch() -> None:
    for kind in (Stream(7), Numbers(7), DataLoader(Numbers(7), batch_size=8)):
        parts = [loaders({"type": Numbers, "validation": kind}, rank, 2).validation for rank in (0, 1)]
        for _ in range(2):
            assert [[ids(batch) for batch in part or ()] for part in parts] == [[[0, 1, 2]], [[3, 4, 5, 6]]]


def test_a_validation_batch_that_is_not_the_last_is_whole() -> None:
    def batches(*sizes: int) -> Any:
        class Sized:
            def __iter__(self) -> Iterator[Any]:
                return iter([{"x": torch.zeros(size)} for size in sizes])

        return Sized()

    for sizes in ((8, 3, 8), (3, 8), (8, 9)):
        validation = loaders({"type": Numbers, "validation": batches(*sizes)}).validation
        assert validation is not None
        with pytest.raises(ValueError, match=r"gave a batch of [39] samples, but the validation batch size"):
            list(validation)
    per_rank = {"type": lambda: batches(4, 4, 1), "per_rank": True}
    validation = loaders({"type": Numbers, "validation": per_rank}, 1, 2).validation
    assert [len(ids(batch)) for batch in validation or ()] == [4, 4, 1]


def test_validation_may_have_its_own_batch_size() -> None:
    built = loaders({"type": Numbers, "validation": Numbers()}, 1, 2, eval_batch_size=4)
    assert built.validation is not None
    assert ids(next(iter(built.validation))) == [2, 3]
    with pytest.raises(ValueError, match=r"train\.eval_batch_size = 3 does not divide over 2 data ranks"):
        loaders(Numbers(), 0, 2, eval_batch_size=3)


def test_validation_of_a_split() -> None:
    built = loaders({"type": "PythonStdlib", "max_bytes": 100_000}, seq_len=32)
    assert built.validation is not None
    assert built.validation_missing is None
    train, held = built.train.source.dataset, built.validation.source.dataset  # type: ignore[attr-defined]
    assert train.seq_len == held.seq_len == 32
    assert next(iter(built.validation))["inputs"].equal(held.batch(np.arange(8))["inputs"])
    assert "sha256" in built.description
    assert loaders({"type": "PythonStdlib", "validation": None}, seq_len=32).validation is None


def test_validation_options_in_place_of_those_for_training(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 1000)
    (tmp_path / "b.txt").write_bytes(b"b" * 1000)
    options = {"type": "TextFolder", "path": tmp_path, "pattern": "a*", "validation_fraction": 0}
    built = loaders({**options, "validation": {"pattern": "b*", "validation_fraction": 0.5}}, seq_len=16)
    assert built.validation is not None
    assert set(next(iter(built.validation))["inputs"].flatten().tolist()) == {ord("b")}
    built = loaders(options, seq_len=16)
    assert built.validation is None
    assert "validation_fraction = 0" in str(built.validation_missing)


def test_held_out_data_too_small_for_a_sample() -> None:
    built = loaders({"type": "PythonStdlib", "max_bytes": 2000}, seq_len=128)
    assert built.validation is None
    assert "one sample needs seq_len + 1 = 129" in str(built.validation_missing)
    assert "one sample needs" in built.description
    with pytest.raises(ValueError, match="Numbers has no samples"):
        loaders({"type": Numbers, "validation": Numbers(0)})


def test_validation_cannot_be_read_once_only() -> None:
    with pytest.raises(ValueError, match=r"data\.validation: generator is an iterator"):
        loaders({"type": Numbers, "validation": (batch for batch in Batches())})


# What a config may hold


def test_a_user_function_gets_what_it_names() -> None:
    calls = []

    def make(split: str, seq_len: int, data_rank: int, vocab_size: int = 5, extra: str = "") -> Numbers:
        calls.append((split, seq_len, data_rank, vocab_size, extra))
        return Numbers()

    built = loaders({"type": make, "extra": "e", "seq_len": 9}, 1, 2, seq_len=7)
    assert calls == [("train", 9, 1, 5, "e"), ("validation", 9, 1, 5, "e")]
    assert built.validation is not None
    built = loaders(make, 0, 2, seq_len=7, vocab_size=50)
    assert calls[2:] == [("train", 7, 0, 50, ""), ("validation", 7, 0, 50, "")]


def test_a_function_that_names_an_option_of_ours_gets_it() -> None:
    def make(num_workers: int) -> DataLoader[Any]:
        assert num_workers == 0
        return DataLoader(Numbers(), batch_size=BATCH)

    assert ids(next(loaders({"type": make, "num_workers": 0}).train)) == list(range(8))


def test_a_registered_class_a_name_and_a_named_section() -> None:
    DATASETS.register("test-numbers")(Numbers)
    for data in ("test-numbers", {"type": "test-numbers", "count": 40}, Named(type="test-numbers", count=40)):
        assert len(ids(next(loaders(data).train))) == BATCH
    assert loaders(Named(type="test-numbers", count=40)).train.source.num_samples == 40  # type: ignore[attr-defined]


def test_a_token_file_is_checked_against_the_models_vocabulary(tmp_path: Path) -> None:
    np.full(4000, 300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = {"type": "TokenFile", "path": str(tmp_path / "a.bin")}
    assert next(loaders(data, seq_len=8, vocab_size=301).train)["labels"].unique().tolist() == [300]
    with pytest.raises(ValueError, match="token id 300"):
        next(loaders(data, seq_len=8, vocab_size=256).train)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (None, {}, r"no data: set data = dict\(type='PythonStdlib'\)"),
        ({"path": "x"}, {}, "data needs a 'type'"),
        ("PythonStdlb", {}, "Did you mean 'PythonStdlib'"),
        ({"type": "PythonStdlib", "seqlen": 4}, {}, "PythonStdlib has no option 'seqlen'. Did you mean 'seq_len'"),
        ("PythonStdlib", {}, "PythonStdlib needs 'seq_len': set data.seq_len"),
        ("PythonStdlib", {"seq_len": 8, "vocab_size": 128}, r"up to 255 .*model.vocab_size = 128.* to 256 or more"),
        (
            {"type": "PythonStdlib", "validation": None},
            {"seq_len": 8, "vocab_size": 128},
            r"a vocabulary of 256\), but model.vocab_size = 128",
        ),
        (object(), {}, "data is a object, which is neither"),
        ([], {}, "list has no samples"),
        ({"type": lambda: 5}, {}, "int is neither a dataset"),
        ({"type": Numbers, "num_workers": -1}, {}, "data.num_workers = -1"),
        ({"type": Numbers, "per_rank": True}, {}, "data.per_rank is for a DataLoader"),
        ({"type": Batches, "num_workers": 2}, {}, "data.num_workers is for a dataset"),
        ({"type": Batches, "collate_fn": len}, {}, "data.collate_fn is for a dataset"),
        ({"type": Batches(), "size": 4}, {}, "Batches is made already and takes no option size"),
        (Numbers(), {"global_batch_size": 9, "data_size": 2}, r"9 does not divide over 2 data ranks \(9 / 2 = 4.50\)"),
        (Numbers(), {"data_rank": 2, "data_size": 2}, "data_rank = 2 is outside"),
        (Numbers(), {"seed": -1}, "seed = -1 is negative"),
    ],
)
def test_errors(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_loaders(data, **{"seed": 0, "global_batch_size": BATCH, "data_rank": 0, "data_size": 1, **options})


def test_batches_go_to_the_device() -> None:
    batch = next(loaders(Batches(), device="meta").train)
    assert batch["x"].device.type == "meta"


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="colossus.data")
