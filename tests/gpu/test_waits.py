"""The host runs ahead of the device: between two logging steps no step waits for what it has queued.

The host is at most one step ahead: each step reads numbers of the step before. On devices that do not exist the default
run counts waits (`tests/engine/test_device_steps.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.training import batch_of, config_of

import colossus
from colossus.engine.engine import Engine

MODEL: dict[str, Any] = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=53, seq_len=16)
#: precision, and the sections that differ from a config that clips
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "fp64": ("fp64", {}),
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "all in bf16": (dict(params="bf16", compute="bf16", reduce="bf16", optimizer="bf16"), {}),
    "clipped by value": ("fp32", dict(train=dict(clip_grad_value=0.1))),
    "skips what is not finite": ("fp32", dict(train=dict(on_nonfinite="skip"))),
    "accumulation": ("bf16", dict(schedule=dict(microbatches=4))),
    "dropout": ("fp32", dict(model=dict(dropout=0.1, attention_dropout=0.1))),
    "recomputation": ("bf16", dict(train=dict(activation_checkpoint="full"))),
    "selective recomputation": ("bf16", dict(train=dict(activation_checkpoint="selective"))),
    "Llama": ("bf16", dict(model=dict(positions="rotary", norm="rmsnorm", mlp="swiglu", bias=False))),
    "z-loss and smoothing": ("fp32", dict(model=dict(z_loss=1e-2, label_smoothing=0.1))),
    "SGD": ("fp32", dict(optimizer=dict(type="SGD", lr=1e-2, momentum=0.9, weight_decay=0.0))),
}
#: seconds of `torch.cuda._sleep`; the host must finish a step in half of them
SLEEP_SECONDS = 2.0


def make_engine(precision: Any, **more: Any) -> Engine:
    config = config_of({}, 100, precision, device="cuda", **{**more, "model": {**MODEL, **more.get("model", {})}})
    return colossus.initialize(config)


def make_batch(device: torch.device) -> dict[str, torch.Tensor]:
    return {key: value.to(device) for key, value in batch_of(0, MODEL).items()}


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise RuntimeError where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_wait_for_nothing(cuda: torch.device, ranks: DeviceRanks, name: str) -> None:
    loss = ranks.run_one(run_steps, name)
    assert 0 < loss < 10, f"the loss is {loss}"


def run_steps(rank: int, device: torch.device, name: str) -> float:
    """Return the loss of the last step; the first steps may wait: optimizer state is made, shapes are new."""
    precision, more = CONFIGS[name]
    engine, batch = make_engine(precision, **more), make_batch(device)
    for _ in range(3):
        engine.train_step(batch)
    with no_waits():
        for _ in range(4):
            result = engine.train_step(batch)
    loss = result.loss
    engine.close()
    return loss


def test_the_host_is_ahead_of_a_busy_device(
    cuda: torch.device, ranks: DeviceRanks, figures: Callable[[Any], None]
) -> None:
    host, device_seconds = ranks.run_one(run_ahead)
    figures({"host ms for a step": 1000 * host, "device busy s": device_seconds})
    assert host < device_seconds / 2, f"the host queued a step in {host:.2f} s of {device_seconds:.2f} s"


def run_ahead(rank: int, device: torch.device) -> tuple[float, float]:
    """Queue a step behind a kernel that takes longer than the host needs; return seconds of host and device."""
    engine, batch = make_engine("bf16"), make_batch(device)
    for _ in range(3):
        engine.train_step(batch)
    for _ in range(2):  # the first brings the clocks up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(200_000_000)
        torch.cuda.synchronize()
        cycles = 200_000_000 / (time.perf_counter() - begin)
    begin = time.perf_counter()
    torch.cuda._sleep(int(cycles * SLEEP_SECONDS))
    engine.train_step(batch)
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    device_seconds = time.perf_counter() - begin
    engine.close()
    return host, device_seconds


def test_a_wait_raises(cuda: torch.device, ranks: DeviceRanks) -> None:
    message = ranks.run_one(wait_in_a_step)
    assert "synchroniz" in message, f"a planted item() in a step raised {message}"


def wait_in_a_step(rank: int, device: torch.device) -> str:
    engine, batch = make_engine("fp32"), make_batch(device)
    engine.train_step(batch)
    weight = next(engine.model.parameters())
    weight.register_hook(lambda grad: grad * grad.sum().sign().item() ** 2)
    try:
        with no_waits():
            engine.train_step(batch)
    except RuntimeError as error:
        return str(error)
    return "nothing"
