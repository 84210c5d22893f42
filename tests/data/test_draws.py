"""Samples read fast are those that are read one by one with all generators seeded, whatever they draw, and when; a
stream's are those that one process reads after it has seeded them."""

from __future__ import annotations

import cProfile
import random
import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from colossus.data import Loaders, build_loaders, own_generators
from colossus.data.draws import KINDS, PROBED, watched
from colossus.data.passes import SamplePasses
from colossus.data.sampler import sample_indices
from colossus.data.seed_sequences import seeds_of_places
from colossus.data.seeded import item_seed
from colossus.random import GLOBAL_RNG, derive_seeds

SEED, BATCH, SAMPLES = 3, 24, 101  # odd on purpose: batches straddle passes
_ORDER = np.concatenate([sample_indices(SEED, step, SAMPLES, BATCH) for step in range(9)])
_OF_RANK_1 = _ORDER.reshape(9, 3, BATCH // 3)[:, 1].reshape(-1)
#: samples that neither the only data rank nor the second of three reads among the first
LATE = frozenset(range(SAMPLES)) - {*_ORDER[: PROBED + 9].tolist(), *_OF_RANK_1[: PROBED + 9].tolist()}
LATE_2, LATE_3 = sorted(LATE)[::5], sorted(LATE)[::7]


def forked() -> float:
    with torch.random.fork_rng():
        return float(torch.rand(()))


def gaussian() -> float:
    return float(np.random.randn())  # numpy makes two at once, and keeps one


def kept_numpy() -> float:
    state = np.random.get_state()
    try:
        return gaussian()
    finally:
        np.random.set_state(state)


def kept_python() -> float:
    state = random.getstate()
    try:
        return random.random()
    finally:
        random.setstate(state)


#: what a sample draws, by its number
WAYS: dict[str, Callable[[int], float]] = {
    "nothing": lambda index: 0.0,
    "torch": lambda index: float(torch.rand(())),
    "python": lambda index: random.random(),
    "numpy": lambda index: gaussian(),
    "all, one after the other": lambda index: [torch.rand(()).item, random.random, gaussian][index % 3](),
    "late torch": lambda index: float(torch.rand(())) if index in LATE else 0.0,
    "late python": lambda index: random.gauss(0, 1) if index in LATE else 0.0,
    "late numpy": lambda index: gaussian() if index == max(LATE) else 0.0,
    "late 624 words": lambda index: np.random.bytes(4 * 624)[5] if index in LATE else 0.0,
    "python, late numpy": lambda index: random.random() + (gaussian() if index in LATE else 0.0),
    "one by one, late": lambda index: sum(
        [
            random.random() if index in LATE else 0,
            gaussian() if index in LATE_2 else 0,
            torch.rand(()).item() * (index in LATE_3),
        ]
    ),
    "torch's generator by name": lambda index: float(torch.rand((), generator=torch.random.default_generator)),
    "a generator seeded by torch's": lambda index: np.random.default_rng(torch.initial_seed()).random(),
    "a generator seeded by numpy's": lambda index: np.random.default_rng(np.random.get_state()[1][:4]).random(),
    "what puts the state back": lambda index: forked(),
    "late, what puts the state back": lambda index: forked() if index in LATE else 0.0,
    "late, torch's seed": lambda index: np.random.default_rng(torch.initial_seed()).random() if index in LATE else 0.0,
    "late, numpy's state put back": lambda index: kept_numpy() if index in LATE else 0.0,
    "late, python's state put back": lambda index: kept_python() if index in LATE else 0.0,
    "its own seed": lambda index: np.random.seed(index) or gaussian(),  # type: ignore[func-returns-value]
}


class Samples(Dataset[Tensor]):
    def __init__(self, way: str) -> None:
        self.way = way

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), WAYS[self.way](index)], dtype=torch.float64)


class ManyAtOnce(Samples):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Tensor]):
    def __init__(self, way: str) -> None:
        self.samples = Samples(way)

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(SAMPLES):
            yield self.samples[index]
        random.random()  # also behind the last sample


class Moving(Stream):
    """Notes its place in an attribute, and cannot start over in the middle."""

    place = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < SAMPLES:
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = 0


class Once(Stream):
    """Cannot start over, which nobody sees from outside."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.numbers = [iter(range(SAMPLES))]

    def __iter__(self) -> Iterator[Tensor]:
        for index in self.numbers[0]:
            yield self.samples[index]


def loaders(data: Any, rank: int = 0, size: int = 1) -> Loaders:
    return build_loaders(data, seed=SEED, global_batch_size=BATCH, data_rank=rank, data_size=size)


def map_batch(way: str, step: int) -> Tensor:
    """Each sample with all generators seeded by its place in the batch."""
    rows = []
    numbers = sample_indices(SEED, step, SAMPLES, BATCH).tolist()
    for index, seed in zip(numbers, derive_seeds(SEED, (step,), BATCH), strict=True):
        GLOBAL_RNG.seed(seed)
        rows.append(Samples(way)[index])
    return torch.stack(rows)


@cache
def stream_pass(way: str, epoch: int) -> list[Tensor]:
    """What one process reads that seeds all generators before it."""
    with GLOBAL_RNG.preserved(item_seed(SEED, epoch, 0)):
        return list(Stream(way))


def stream_batch(way: str, step: int) -> Tensor:
    places = range(step * BATCH, (step + 1) * BATCH)
    return torch.stack([stream_pass(way, place // SAMPLES)[place % SAMPLES] for place in places])


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_sample_draws_depends_on_its_place_only(way: str, rank: int | None) -> None:
    own = slice(None) if rank is None else slice(8 * rank, 8 * rank + 8)
    place = (0, 1) if rank is None else (rank, 3)
    for kind, expected in (
        (Samples, map_batch),
        (ManyAtOnce, map_batch),
        (Stream, stream_batch),
        (Moving, stream_batch),
    ):
        train = loaders(kind(way), *place).train
        for step in range(9):
            assert torch.equal(next(train), expected(way, step)[own]), (kind.__name__, step)


@pytest.mark.rest("1-nothing")
@pytest.mark.parametrize("way", ["nothing", "late numpy", "one by one, late"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_in_the_middle_of_a_pass(way: str, workers: int) -> None:
    data = {"type": lambda: Stream(way), "num_workers": workers}
    for step in (3, 4, 6):
        first, second = loaders(data).train, loaders(data).train
        for _ in range(step):
            next(first)
        second.load_state_dict(first.state_dict())
        for later in range(step, 10):
            assert torch.equal(next(second), stream_batch(way, later)), (step, later)


@pytest.mark.parametrize("way", ["torch", "late numpy"])
def test_workers(way: str) -> None:
    maps = loaders({"type": lambda: Samples(way), "num_workers": 2}, 1, 3).train
    stream = loaders({"type": lambda: Stream(way), "num_workers": 1}, 1, 3).train
    for step in range(9):
        assert torch.equal(next(maps), map_batch(way, step)[8:16])
        assert torch.equal(next(stream), stream_batch(way, step)[8:16])


class Counting(Samples):
    """Has a state of its own."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.count = 0

    def __getitem__(self, index: int) -> Tensor:
        self.count += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [Samples, Counting])
def test_a_draw_that_comes_late_is_told(
    kind: type[Samples], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = int(_ORDER[PROBED + 9])
    assert late in LATE
    monkeypatch.setitem(WAYS, "one", lambda index: random.random() if index == late else 0.0)
    data = kind("one")
    train = loaders(data).train
    for _ in range(9):
        next(train)
    assert len(caplog.records) == 1
    assert f"{kind.__name__} draws from random (or asks for" in caplog.text
    if isinstance(data, Counting):
        assert data.count == 9 * BATCH  # each sample once
        assert "to read them again would change its own state twice" in caplog.text
    else:
        assert "samples just read are read again" in caplog.text


class Holding(Samples):
    """Has a generator among its attributes, and draws from it; from a global one in sample ``late``, too."""

    late = -1

    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__("nothing")
        self.generator, self.draw = generator, draw
        self.reads = [0]

    def __getitem__(self, index: int) -> Tensor:
        self.reads[0] += 1
        drawn = self.draw(self.generator) + (random.random() if index == self.late else 0.0)
        return super().__getitem__(index) + drawn


def batch_plus_draw(generator: random.Random) -> Callable[[list[Tensor]], Tensor]:
    class Collate:
        def __init__(self) -> None:
            self.generator = generator

        def __call__(self, samples: list[Tensor]) -> Tensor:
            return torch.stack(samples) + self.generator.random()

    return Collate()


OWN: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy": (lambda: Holding(np.random.default_rng(0), lambda own: own.random()), "Holding draws .* own .generator."),
    "wrapped": (lambda: Subset(Holding(random.Random(0), random.Random.random), range(50)), "own .dataset.generator."),
    "collate_fn": (
        lambda: {"type": lambda: Samples("nothing"), "collate_fn": batch_plus_draw(random.Random(0))},
        "collate_fn draws .* own .generator.",
    ),
    "still": (lambda: Holding(random.Random(0), lambda own: 0.0), ""),
    "global": (lambda: Holding(np.random.mtrand._rand, lambda own: own.rand()), ""),
    "of the system": (lambda: Holding(random.SystemRandom(), lambda own: own.random()), ""),
}


@pytest.mark.parametrize("name", OWN)
def test_draws_from_generators_of_its_own_are_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, words = OWN[name]
    train = loaders(make(), 1, 3).train
    for _ in range(9):
        next(train)
    assert len(caplog.records) == bool(words)
    assert re.search(words, caplog.text)


def test_samples_of_a_dataset_whose_generator_has_moved_are_read_once(caplog: pytest.LogCaptureFixture) -> None:
    data = Holding(random.Random(0), random.Random.random)
    data.late = int(_ORDER[PROBED + 9])
    train = loaders(data).train
    for _ in range(5):
        next(train)
    assert data.reads == [5 * BATCH]
    assert "to read them again would change its own state twice" in caplog.text


def test_states_of_many_generators_are_not_taken_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(own_generators, "_get_state", lambda generator: taken.append(generator) or b"")
    train = loaders(Holding(random.Random(0), lambda own: 0.0)).train
    for _ in range(9):
        next(train)
    assert len(taken) <= 3  # before the first, and behind the first 32 samples


@pytest.mark.parametrize("own", ["attribute", "nested"])
def test_generators_of_its_own_are_read_once(own: str) -> None:
    """Of a stream that draws from a global generator late."""

    class Own(Stream):
        def __init__(self) -> None:
            super().__init__("late torch")
            generator = random.Random(0)
            self.generators = generator if own == "attribute" else [generator]

        def __iter__(self) -> Iterator[Tensor]:
            generator = self.generators if own == "attribute" else self.generators[0]
            for sample in super().__iter__():
                yield sample + generator.random()

    expected = random.Random(0)
    first, second = loaders(Own()).train, loaders(Own()).train
    batches = [next(first) for _ in range(4)]
    for step, batch in enumerate(batches):
        added = torch.tensor([expected.random() for _ in range(BATCH)], dtype=torch.float64)
        assert torch.equal(batch, stream_batch("late torch", step) + added[:, None])
    second.load_state_dict(first.state_dict() | {"step": 2, "passes": {"epoch": 0, "offset": 2 * BATCH}})
    assert torch.equal(next(second), batches[2])


def test_a_stream_that_cannot_start_over_and_draws_late() -> None:
    train = loaders(Once("late numpy")).train
    for step in range(SAMPLES // BATCH):
        assert torch.equal(next(train), stream_batch("late numpy", step))


def test_an_error_in_the_middle_of_a_batch_leaves_the_place_behind_what_was_read() -> None:
    class Failing(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return self

        place = 0

        def __next__(self) -> int:
            self.place += 1
            if self.place == 2 * BATCH + 6:
                raise OSError("a shard is missing")
            return self.place

    train = loaders(Failing()).train
    next(train), next(train)
    with pytest.raises(OSError, match="a shard"):
        next(train)
    assert train.state_dict()["passes"] == {"epoch": 0, "offset": 2 * BATCH + 6, "failed": [2 * BATCH + 5]}
    assert next(train)[0] == 2 * BATCH + 7


def test_passing_over_a_million_items_keeps_none_of_them() -> None:
    passes = SamplePasses(IterableNumbers(1_000_000), SEED, name="numbers")
    tracemalloc.start()
    try:
        passes.load_state_dict({"epoch": 0, "offset": 900_000})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert passes.take(1) == [900_000]
    with pytest.raises(ValueError, match="numbers has less than 1000001 items in pass 2, but the run that goes on had"):
        passes.load_state_dict({"epoch": 2, "offset": 1_000_001})


class IterableNumbers(IterableDataset[int]):
    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[int]:
        yield from range(self.stop)


@pytest.mark.parametrize("kind", [Samples, Stream])
@pytest.mark.parametrize("way", ["nothing", "late python", "numpy"])
def test_the_generators_outside_are_left_alone(kind: Any, way: str) -> None:
    def draw() -> list[float]:
        return [torch.randn(()).item(), random.gauss(0, 1), np.random.randn()]

    def seed() -> None:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        draw()  # each keeps half of what it made

    train = loaders(kind(way)).train
    seed()
    expected = draw()
    seed()
    next(train), next(train)
    assert draw() == expected


@pytest.mark.parametrize("seed", [0, 3, 2**32, 2**140 + 1])
@pytest.mark.parametrize("key", [(0,), (2**33, 7)])
def test_seeds_of_many_places(seed: int, key: tuple[int, ...]) -> None:
    for start in (0, 5, 2**32 - 3):
        places = range(start, start + 6)
        assert seeds_of_places(seed, key, start, start + 6) == [derive_seeds(seed, (*key, p))[0] for p in places]


def test_threads_that_read_at_once_leave_the_functions_as_they_were() -> None:
    telling = [(random, "getstate"), (np.random, "get_state"), (torch, "initial_seed"), (torch.random, "get_rng_state")]
    before = [getattr(module, name) for module, name in telling]
    first, second = threading.Barrier(2), threading.Barrier(2)
    kinds = {}

    def first_out(asks: bool) -> None:
        def read() -> None:
            first.wait(10)
            if asks:
                torch.get_rng_state()
            second.wait(10)

        kinds[asks] = watched(read, 0, closely=False)[1]

    threads = [threading.Thread(target=first_out, args=(asks,)) for asks in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == {True: set(KINDS), False: set()}  # of its own thread alone
    assert [getattr(module, name) for module, name in telling] == before


def test_what_is_kept_while_samples_are_read_goes_on_telling() -> None:
    (kept, generator), kinds = watched(lambda: (torch.get_rng_state, torch.random.default_generator), 0, closely=False)
    assert kinds == set()
    assert generator is torch.default_generator
    assert torch.equal(kept(), torch.get_rng_state())


def test_a_profiler_in_c_goes_on() -> None:
    profiler, drawn = cProfile.Profile(), []
    with profiler:
        result, kinds = watched(lambda: drawn.append(1), 0)
    assert (result, drawn) == (None, [1])
    assert kinds <= set(KINDS)
    assert profiler.getstats()
    with profiler:
        assert watched(random.random, 0)[1] == {"random"}
        assert watched(lambda: torch.initial_seed(), 0)[1] == set(KINDS)
