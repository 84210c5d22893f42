"""On CUDA one batch is read and copied ahead of its step, which nothing but the clock can tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.datasets import BATCH, Batches, Numbers, Remembering, Stream, ids, loaders, same
from helpers.fake_cuda import HiddenWait, Waits, run_fake_ranks
from helpers.fake_cuda.pretend import DEVICE, FakeStream
from helpers.training import config_of
from torch.utils.data import DataLoader

import colossus
from colossus.data.loader import DeviceCopy
from colossus.nest import tensors

KINDS: dict[str, Callable[[], Any]] = {
    "map": Numbers,
    "stream": Stream,
    "remembering": Remembering,
    "loader": lambda: DataLoader(Numbers(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "batches": Batches,
    "stream in a worker": lambda: {"type": Stream, "num_workers": 1},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders read ahead on the CPU, too, where what they give can be looked at."""
    monkeypatch.setattr(DeviceCopy, "is_asynchronous", True)


def play(train: Any, kind: str, seed: int) -> list[Any]:
    """What a loader answers to calls in any order."""
    chosen = random.Random(seed)
    answers: list[Any] = []
    for _ in range(14):
        call = chosen.choice(["next", "next", "next", "peek", "step", "state", "set", "trained"])
        if call == "next":
            answers.append(next(train))
        elif call == "peek":
            answers.append(train.peek())
        elif call == "set" and kind != "remembering":  # it could go back by its own state only
            train.set_step(max(0, train.step + chosen.choice([-2, 0, 1])))
        elif call == "trained":
            train.num_untrained = min(train.num_untrained, 1)
            answers.append(train.trained_state_dict().get("step"))
        elif call == "state":
            state = train.state_dict()
            train = loaders(KINDS[kind]()).train
            train.load_state_dict(state)
        answers.append((train.step, train.num_untrained))
    return answers


@kinds
def test_all_calls_answer_what_they_answer_without(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(2) if "worker" in kind else range(12)
    plain = [play(loaders(KINDS[kind]()).train, kind, seed) for seed in seeds]
    monkeypatch.setattr(DeviceCopy, "is_asynchronous", True)
    for seed, expected in zip(seeds, plain, strict=True):
        for answer, right in zip(play(loaders(KINDS[kind]()).train, kind, seed), expected, strict=True):
            assert same(answer, right) if isinstance(right, dict) else answer == right


@kinds
def test_every_evaluation_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluations() -> list[Any]:
        data = KINDS[kind]()
        held_out = data if isinstance(data, dict) else {"type": lambda: data}
        validation = loaders({"type": Numbers, "validation": held_out}).validation
        assert validation is not None
        broken = iter(validation)
        return [next(broken), *validation] if kind != "remembering" else list(validation)

    plain = evaluations()
    monkeypatch.setattr(DeviceCopy, "is_asynchronous", True)
    found = evaluations()
    assert len(found) == len(plain)
    assert all(map(same, found, plain))


class Failing(Numbers):
    fails = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.fails and index == 0:
            raise OSError("the disk has gone")
        return super().__getitem__(index)


def test_an_error_is_raised_when_it_is_due(ahead: None) -> None:
    data = Failing()
    data.fails = False
    whole = [batch for _, batch in zip(range(6), loaders(data).train, strict=False)]
    at = next(step for step, batch in enumerate(whole) if 0 in ids(batch))
    assert at > 0, "another seed is needed"
    data.fails = True
    train = loaders(data).train
    for batch in whole[:at]:
        assert same(next(train), batch)
    for read in (train.__next__, train.peek):
        with pytest.raises(OSError, match="the disk has gone"):
            read()
        assert (train.step, train.num_untrained) == (at, at)
    data.fails = False
    assert same(next(train), whole[at])  # a caller may try again


def test_an_interrupted_read_loses_nothing(ahead: None) -> None:
    class Interrupted(Numbers):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            if self.reads == 2 * BATCH + 3:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    whole = [batch for _, batch in zip(range(3), loaders(Numbers()).train, strict=False)]
    train = loaders(Interrupted()).train
    next(train)
    with pytest.raises(KeyboardInterrupt):
        next(train)
    assert train.state_dict()["step"] == train.step == 1
    assert same(next(train), whole[1])
    assert same(next(train), whole[2])


def test_what_depends_on_the_steps_is_not_read_ahead(ahead: None) -> None:
    """A generator of batches may make them from what the model does; any other data may be said to."""
    read: list[int] = []
    next(loaders(read.append(len(read)) or {"x": torch.zeros(BATCH)} for _ in range(3)).train)
    assert read == [0]

    class Counted(Numbers):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    for options, batches in (({}, 2), ({"read_ahead": False}, 1), ({"read_ahead": True}, 2)):
        read.clear()
        next(loaders({"type": Counted, **options}).train)
        assert len(read) == batches * BATCH
    with pytest.raises(ValueError, match=r"data\.read_ahead = 'no' is neither True nor False"):
        loaders({"type": Counted, "read_ahead": "no"})


def test_on_the_cpu_nothing_is_read_ahead() -> None:
    train = loaders(Numbers()).train
    next(train)
    assert train.source.step == 1


# -- on a device ---------------------------------------------------------------------------------------------------


def ready() -> Any:
    return [
        {
            "x": torch.zeros(BATCH, 3),
            "y": torch.zeros(3, BATCH).t(),
            "same": torch.zeros(1).expand(BATCH),
            "name": ["a"] * BATCH,
        }
    ] * 5


def body(rank: int) -> None:
    recorded: list[Any] = []
    arrived: list[Any] = []
    wait_event = FakeStream.wait_event
    FakeStream.wait_event = lambda self, event: (arrived.append((self, event)), wait_event(self, event))[1]  # type: ignore
    record = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda self, stream: (recorded.append(stream), record(self, stream))[1]  # type: ignore
    data: dict[str, Any] = {
        "map": Numbers(), "stream": Stream(), "loader": KINDS["loader"](),
        "tokens": {"type": "PythonStdlib", "seq_len": 16, "max_bytes": 8000},
        "validation": {"type": Numbers, "validation": {"type": Numbers}},
        "ready": {"type": lambda: DataLoader(ready(), batch_size=None)},
        "pinned": {"type": lambda: ready().__iter__(), "read_ahead": True},
        "not ahead": {"type": Numbers, "read_ahead": False},
    }  # fmt: skip
    for name, each in data.items():
        made = loaders(each, device=DEVICE)
        batches: Any = made.validation if name == "validation" else made.train
        recorded.clear(), arrived.clear()
        torch.Tensor.is_pinned = lambda self, name=name: name == "pinned"  # type: ignore[method-assign, assignment]
        with Waits():
            for number, batch in zip(range(3), batches, strict=False):
                found = [value for _, value in tensors(batch)]
                assert found
                assert all(x.device == DEVICE for x in found), (name, number)
                assert torch.stack([x.sum() for x in found]).device == DEVICE
        here = torch.cuda.current_stream()
        assert recorded
        assert len(arrived) == len({event for _, event in arrived}) == 3
        assert all(stream is here for stream, _ in arrived)
        assert all(stream is here for stream in recorded), name
        assert isinstance(batches._copy._stream, FakeStream)
        assert batches._copy._stream is not here
        # what they read next may be written to their own pinned memory, out of which a copy goes
        theirs = batches._copy._reads_theirs
        assert (theirs is not None) == (name == "pinned"), name
        if theirs is not None:
            waited: list[Any] = []
            theirs.synchronize = lambda waited=waited: waited.append(True)
            batches._copy.let_go()
            assert waited
    assert batch["x"].device == DEVICE
    with pytest.raises(HiddenWait, match="_to_copy"), Waits():  # what a plain copy would do
        Numbers()[0]["x"].to(DEVICE)


def test_batches_come_to_a_device_and_nobody_waits() -> None:
    run_fake_ranks(1, body)


def step_body(rank: int) -> None:
    config = config_of(dict(data=2), 9, "fp32", device="cuda")
    config["model"]["vocab_size"], config["data"] = 256, dict(type="PythonStdlib", max_bytes=20_000)
    engine = colossus.initialize(config)
    assert engine.loaders is not None
    train = engine.loaders.train
    engine.train_step(next(train))
    with Waits():
        for _ in range(2):
            engine.train_step(next(train))
    assert (train.step, train.source.step, train.state_dict()["step"]) == (3, 4, 3)
    engine.close()


def test_steps_read_and_train_without_a_wait() -> None:
    run_fake_ranks(2, step_body)
