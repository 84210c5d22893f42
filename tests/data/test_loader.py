"""What the engine reads: order, slices, resume, for each kind of data a user may bring."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.datasets import BATCH, KINDS, SAMPLES, Batches, Numbers, Stream, ids, joined, loaders, same, shuffled
from torch.utils.data import DataLoader

from colossus.config.section import Named
from colossus.data import BatchedDataset, build_loaders
from colossus.registry import DATASETS

kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


# Laws that hold for every kind of data


@kinds
@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_the_data_ranks_are_the_batch_of_one_process(make: Callable[[], Any], size: int) -> None:
    """Also the random numbers that the dataset draws belong to the place in the global batch."""
    whole = islice(loaders(make()).train, 9)
    ranks = [islice(loaders(make(), rank, size).train, 9) for rank in range(size)]
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
        left = next(one)
        assert draw() == expected
        torch.manual_seed(2), random.seed(2), np.random.seed(2)
        assert same(left, next(other))


@kinds
@pytest.mark.parametrize("step", [0, 3, 11])
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


@pytest.mark.parametrize("kind", ["map", "stream", "remembering", "loader"])
def test_set_step_goes_back_too(kind: str) -> None:
    train = loaders(KINDS[kind]()).train
    run = [next(train) for _ in range(7)]
    for step in (2, 0):
        train.set_step(step)
        assert all(same(next(train), batch) for batch in run[step:])
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
        with pytest.raises(ValueError, match=r"gives batches of [39] samples, but the validation batch size"):
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
        ({"type": Numbers, "seed_samples": "no"}, {}, "data.seed_samples = 'no' is neither True nor False"),
        ({"type": Numbers, "multiprocessing_context": "threads"}, {}, "is not 'fork', 'forkserver' or 'spawn'"),
        ({"type": Numbers, "worker_timeout": "no"}, {}, "data.worker_timeout = 'no' is not a number of seconds"),
        ({"type": Stream, "num_workers": 2}, {}, "Stream is an IterableDataset: .* every sample would come 2 times"),
        ({"type": Numbers, "validation": iter([])}, {}, r"data\.validation: list_iterator is an iterator"),
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
