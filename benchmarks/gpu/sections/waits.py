"""That the host runs ahead of the device: between two logging steps no step waits for what it has told the device.

It is at most one step ahead: each step reads numbers of the one before, which `_runs_ahead` therefore leaves time for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from helpers.training import batch_of, config_of

import colossus
from benchmarks.gpu.section import Case, Figures, LeftOut
from colossus.engine.engine import Engine

MODEL: dict[str, Any] = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=53, seq_len=16)
#: what is changed of a config in fp32 that clips
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
#: of `torch.cuda._sleep`, in half of which the host has to be through with a step
SLEEP_SECONDS = 2.0


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    for name, (precision, more) in CONFIGS.items():
        yield Case(name, partial(_steps, device, precision, more))
    yield Case("the host is ahead of a busy device", partial(_runs_ahead, device))
    yield Case("a wait is found", partial(_is_found, device))


def _engine(device: torch.device, precision: Any, **more: Any) -> Engine:
    if device.type != "cuda":
        raise LeftOut("no CUDA device; on fake ones the suite counts waits (tests/engine/test_device_steps.py)")
    config = config_of({}, 100, precision, device="cuda", **{**more, "model": {**MODEL, **more.get("model", {})}})
    return colossus.initialize(config)


def _batch(device: torch.device) -> dict[str, torch.Tensor]:
    return {key: value.to(device) for key, value in batch_of(0, MODEL).items()}


@contextmanager
def _no_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _steps(device: torch.device, precision: Any, more: dict[str, Any]) -> Figures:
    """The first steps may wait: optimizer state is made, shapes are new."""
    engine = _engine(device, precision, **more)
    batch = _batch(device)
    for _ in range(3):
        engine.train_step(batch)
    with _no_waits():
        for _ in range(4):
            result = engine.train_step(batch)
    loss = result.loss
    engine.close()
    assert 0 < loss < 10, f"the loss is {loss}"
    return {"steps": 4, "loss": loss}


def _runs_ahead(device: torch.device) -> Figures:
    """A step is given to a device that is busy for longer than the host needs for it."""
    engine = _engine(device, "bf16")
    batch = _batch(device)
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
    assert host < device_seconds / 2, f"the host was through with a step after {host:.2f} s of {device_seconds:.2f} s"
    return {"host ms for a step": 1000 * host, "device busy s": device_seconds}


def _is_found(device: torch.device) -> Figures:
    """The mode that the others rely on raises where a step waits."""
    engine = _engine(device, "fp32")
    batch = _batch(device)
    engine.train_step(batch)
    weight = next(engine.model.parameters())
    weight.register_hook(lambda grad: grad * grad.sum().sign().item() ** 2)
    raised = "nothing"
    try:
        with _no_waits():
            engine.train_step(batch)
    except RuntimeError as error:
        raised = str(error)
    assert "synchroniz" in raised, f"a planted item() in a step raised {raised}"
    return {"found": "item()"}
