"""Batches come to a CUDA device on a stream of their own, and nobody waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.datasets import BATCH, Numbers, Stream, loaders, shuffled
from helpers.fake_cuda import HiddenWait, Waits, run_fake_ranks
from helpers.fake_cuda.pretend import DEVICE, FakeStream
from helpers.training import config_of
from torch.utils.data import DataLoader

import colossus
from colossus.nest import tensors


def ready() -> Any:
    x, same = torch.zeros(BATCH, 3), torch.zeros(1).expand(BATCH)
    return [{"x": x, "y": torch.zeros(3, BATCH).t(), "same": same, "name": ["a"] * BATCH}] * 5


def body(rank: int) -> None:
    recorded: list[Any] = []
    waited: list[Any] = []
    wait_stream, record = FakeStream.wait_stream, torch.Tensor.record_stream
    FakeStream.wait_stream = lambda self, other: (waited.append((self, other)), wait_stream(self, other))[1]  # type: ignore
    torch.Tensor.record_stream = lambda self, stream: (recorded.append(stream), record(self, stream))[1]  # type: ignore
    data: dict[str, Any] = {
        "map": Numbers(), "stream": Stream(), "loader": shuffled(),
        "tokens": {"type": "PythonStdlib", "seq_len": 16, "max_bytes": 8000},
        "validation": {"type": Numbers, "validation": {"type": Numbers}},
        "ready": {"type": lambda: DataLoader(ready(), batch_size=None)},
        "pinned": {"type": lambda: ready().__iter__()},
    }  # fmt: skip
    for name, each in data.items():
        made = loaders(each, device=DEVICE)
        batches: Any = made.validation if name == "validation" else made.train
        recorded.clear(), waited.clear()
        torch.Tensor.is_pinned = lambda self, name=name: name == "pinned"  # type: ignore[method-assign, assignment]
        with Waits():
            for number, batch in zip(range(3), batches, strict=False):
                found = [value for _, value in tensors(batch)]
                assert found
                assert all(x.device == DEVICE for x in found), (name, number)
                assert torch.stack([x.sum() for x in found]).device == DEVICE
        here = torch.cuda.current_stream()
        assert recorded
        assert all(stream is here for stream in recorded), name
        assert len(waited) >= 3
        assert all(one is here and isinstance(other, FakeStream) and other is not here for one, other in waited)
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
    assert (train.step, train.source.step, train.state_dict()["step"]) == (3, 3, 3)
    engine.close()


def test_steps_read_and_train_without_a_wait() -> None:
    run_fake_ranks(2, step_body)
