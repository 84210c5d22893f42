"""What the engine reads: order, slices, resume, for each kind of data a user may bring."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.datasets import (
    BATCH,
    KINDS,
    SAMPLES,
    Batches,
    Numbers,
    Remembering,
    Stream,
    ids,
    joined,
    loaders,
    same,
    shuffled,
)
from torch.utils.data import DataLoader

from colossus.data import BatchedDataset, build_loaders

kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


# Laws that hold for every kind of data


@kinds
def test_slices_of_the_data_ranks_are_the_batch_of_one_process(make: Callable[[], Any]) -> None:
    """Also the random numbers that the dataset draws belong to the place in the global batch."""
    whole = islice(loaders(make()).train, 9)
    ranks = [islice(loaders(make(), rank, 4).train, 9) for rank in range(4)]
    for step, (batch, *parts) in enumerate(zip(whole, *ranks, strict=True)):
        assert same(joined(parts), batch), step


@kinds
def test_what_is_read_and_what_the_process_draws_do_not_touch_each_other(make: Callable[[], Any]) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    one, other = loaders(make()).train, loaders(make()).train
    for _ in range(9):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        expected = draw()
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        batch = next(one)
        assert draw() == expected
        torch.manual_seed(2), random.seed(2), np.random.seed(2)
        assert same(batch, next(other))


def with_a_worker() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=BATCH, num_workers=1)


@pytest.mark.parametrize(("make", "step"), [*itertools.product(KINDS.values(), (0, 4, 11)), (with_a_worker, 4)])
def test_a_run_goes_on_by_its_step_and_by_its_state(make: Callable[[], Any], step: int) -> None:
    first = loaders(make()).train
    run = [next(first) for _ in range(step)]
    state = first.state_dict()
    run += [next(first) for _ in range(6)]
    by_step, by_state = loaders(make()).train, loaders(make()).train
    by_step.set_step(step)
    by_state.load_state_dict(state)
    for train in (by_step, by_state):
        assert train.step == step
        assert all(same(next(train), batch) for batch in run[step:])
    is_own_place = isinstance(getattr(by_step.source, "_iterable", None), Remembering)
    for back in () if is_own_place else (2, 0):
        by_step.set_step(back)
        assert all(same(next(by_step), batch) for batch in run[back:])


# Map-style datasets


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


@pytest.mark.parametrize("workers", [0, 2])
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


def test_a_changed_seed_or_data_is_told_on_resume(caplog: pytest.LogCaptureFixture) -> None:
    state = loaders(Numbers()).train.state_dict()
    loaders(Numbers()).train.load_state_dict(state)
    assert not caplog.records
    loaders(Numbers(SAMPLES + 1), seed=4).train.load_state_dict(state)
    assert "seed was 3 when the checkpoint was written and is 4 now" in caplog.text
    assert "num_samples was 29 when the checkpoint was written and is 30 now" in caplog.text


# Validation


@pytest.mark.parametrize("size", [1, 2, 4])
def test_validation_is_the_same_each_time_and_in_order(size: int) -> None:
    built = [loaders({"type": Numbers, "validation": Numbers(27)}, rank, size).validation for rank in range(size)]
    parts = [part for part in built if part is not None]
    for _ in range(2):
        next(iter(parts[0]))  # an evaluation that stopped early
        runs = [list(part) for part in parts]
        assert [len(run) for run in runs] == [4] * size
        numbers = [i for step in zip(*runs, strict=True) for part in step for i in ids(part)]
        assert numbers == list(range(27))
        assert [len(ids(run[-1])) for run in runs] == {1: [3], 2: [1, 2], 4: [0, 1, 1, 1]}[size]  # 27 = 3 x 8 + 3


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
        first, again = list(validation), list(validation)
        assert same(first, again)
        runs.append(first)
    whole = loaders({"type": Numbers, "validation": make()}).validation
    assert whole is not None
    assert [ids(b) for b in whole] == [ids(a) + ids(b) for a, b in zip(*runs, strict=True)]
    assert len(runs[0]) == (5 if make is Batches else 4)
    assert sum(len(ids(batch)) for batch in whole) == (40 if make is Batches else SAMPLES)


def test_a_validation_batch_that_is_not_the_last_is_whole() -> None:
    def batches(*sizes: int) -> Any:
        class Sized:
            def __iter__(self) -> Iterator[Any]:
                return iter([{"x": torch.zeros(size)} for size in sizes])

        return Sized()

    for sizes in ((8, 3, 8), (3, 8), (8, 9)):
        validation = loaders({"type": Numbers, "validation": batches(*sizes)}).validation
        assert validation is not None
        with pytest.raises(ValueError, match=r"gives batches of [39] samples, but the validation batch size"):
            list(validation)
    per_rank = {"type": lambda: batches(4, 4, 1), "per_rank": True}
    validation = loaders({"type": Numbers, "validation": per_rank}, 1, 2).validation
    assert [len(ids(batch)) for batch in validation or ()] == [4, 4, 1]


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


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (None, {}, r"no data: set data = dict\(type='PythonStdlib'\)"),
        ({"path": "x"}, {}, "data needs a 'type'"),
        ("PythonStdlb", {}, "Did you mean 'PythonStdlib'"),
        ({"type": "PythonStdlib", "seqlen": 4}, {}, r"data\.seqlen: no such key; did you mean data\.seq_len\?"),
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
        ({"type": Numbers, "per_rank": True}, {}, "data.per_rank is for a DataLoader"),
        ({"type": Stream, "num_workers": 1}, {}, "Stream is an IterableDataset, and each worker would read"),
        ({"type": Numbers, "validation": iter([])}, {}, r"data\.validation: list_iterator is an iterator"),
        ({"type": Batches, "num_workers": 2}, {}, "data.num_workers are for a dataset"),
        ({"type": Batches(), "size": 4}, {}, "Batches is made already and takes no option size"),
        (Numbers(), {"global_batch_size": 9, "data_size": 2}, r"9 does not divide over 2 data ranks \(9 / 2 = 4.50\)"),
        (Numbers(), {"eval_batch_size": 3, "data_size": 2}, r"train\.eval_batch_size = 3 does not divide over 2 data"),
        (Numbers(), {"seed": -1}, "seed = -1 is negative"),
    ],
)
def test_errors(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_loaders(data, **{"seed": 0, "global_batch_size": BATCH, "data_rank": 0, "data_size": 1, **options})


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="colossus.data")
