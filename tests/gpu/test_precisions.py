"""Precisions in one process: fp32 is plain torch's, low ones are near it; loss scaling, steps that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.plain_training import train_plain
from helpers.training import batch_of, config_of, relative

import colossus
from colossus.engine.engine import Engine
from colossus.engine.nonfinite import NonFiniteGradients

STEPS = 30
MODEL: dict[str, Any] = dict(type="GPT", num_layers=2, hidden_size=64, num_heads=4, vocab_size=53, seq_len=16)
FULL = dict(params="bf16", compute="bf16", reduce="fp32", optimizer="fp32")
PURE = dict(params="bf16", compute="bf16", reduce="bf16", optimizer="bf16")
#: how far the loss of a step may be from that of plain torch in fp32, relative
LOSS_GAPS: dict[str, tuple[Any, float]] = {
    "fp32": ("fp32", 1e-4),
    "bf16": ("bf16", 1e-2),
    "fp16": ("fp16", 2e-3),
    "parameters in bf16, optimizer in fp32": (FULL, 2e-2),
    "all in bf16": (PURE, 1e-1),
}


def make_config(device: torch.device, precision: Any, **more: Any) -> dict[str, Any]:
    more = {"lr_schedule": dict(type="constant", warmup_steps=0), **more}
    return config_of({}, STEPS, precision, model=MODEL, device=device.type, **more)


def make_engine(device: torch.device, precision: Any, **more: Any) -> Engine:
    return colossus.initialize(make_config(device, precision, **more))


def make_batch(device: torch.device, step: int) -> dict[str, torch.Tensor]:
    """Return one of three batches, so that the loss falls."""
    return {key: value.to(device) for key, value in batch_of(step % 3, MODEL).items()}


@pytest.fixture(scope="module")
def plain_losses(ranks: DeviceRanks) -> list[float]:
    """Return the losses of plain torch in fp32 on the device."""
    return ranks.run_one(train_plain_losses)


def train_plain_losses(rank: int, device: torch.device) -> list[float]:
    return train_plain(0, device, make_config(device, "fp32"), torch.float32, STEPS, cycle=3).losses


@pytest.mark.parametrize("name", LOSS_GAPS)
def test_losses(ranks: DeviceRanks, plain_losses: list[float], figures: Callable[[Any], None], name: str) -> None:
    precision, allowed = LOSS_GAPS[name]
    losses = ranks.run_one(train_losses, precision)
    assert losses[-1] < 0.8 * losses[0], f"the loss does not fall: {losses}"
    if precision != "fp32":
        assert losses != ranks.run_one(train_losses, "fp32"), "nothing was computed in low precision"
    gap = max(map(relative, losses, plain_losses))
    figures({"loss gap": gap, "first loss": losses[0], "last loss": losses[-1]})
    assert gap < allowed, f"losses differ by {gap:.2g} of themselves, {allowed} is allowed: {losses}, {plain_losses}"


def train_losses(rank: int, device: torch.device, precision: Any) -> list[float]:
    engine = make_engine(device, precision)
    results = [engine.train_step(make_batch(device, step)) for step in range(STEPS)]
    engine.close()
    return [result.loss for result in results]


def test_the_scale_of_fp16_is_that_of_grad_scaler(ranks: DeviceRanks) -> None:
    scales, expected = ranks.run_one(scale_losses)
    assert scales == expected, f"the scales are {scales}, those of GradScaler {expected}"


def scale_losses(rank: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the scales of the engine and of `torch.amp.GradScaler`: doubled by 3 good steps, halved by a bad one."""
    overflows = (3, 4, 9)
    engine = make_engine(device, "fp16", train=dict(loss_scale=dict(init=1024.0, growth_interval=3)))
    theirs = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    current = plant_infinity(engine, overflows)
    assert engine.loss_scaler is not None
    scales, expected = [], []
    for step in range(14):
        current["step"] = step
        assert moves_weights(engine, step) == (step not in overflows), f"step {step}"
        scales.append(engine.loss_scaler.scale.item())
        theirs.scale((parameter * (torch.inf if step in overflows else 1.0)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        expected.append(theirs.get_scale())
    engine.close()
    return scales, expected


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_is_skipped(ranks: DeviceRanks, precision: str) -> None:
    ranks.run_one(skip_step, precision)


def skip_step(rank: int, device: torch.device, precision: str) -> None:
    engine = make_engine(device, precision, train=dict(on_nonfinite="skip"))
    current = plant_infinity(engine, (2,))
    for step in range(5):
        current["step"] = step
        assert moves_weights(engine, step) == (step != 2), f"step {step}"
        assert all(value.isfinite().all() for value in engine.model.parameters()), f"step {step}: not finite"
    engine.close()


def test_a_step_that_is_not_finite_ends_the_run(ranks: DeviceRanks) -> None:
    step, message = ranks.run_one(step_until_error)
    assert step in (2, 3), f"the error came in step {step}"  # one step late at most: nobody waits for the device
    assert "embedding" in message, f"the error does not name the parameter: {message}"


def step_until_error(rank: int, device: torch.device) -> tuple[int, str]:
    engine = make_engine(device, "fp32")
    current = plant_infinity(engine, (2,))
    for step in range(5):
        current["step"] = step
        try:
            engine.train_step(make_batch(device, step))
        except NonFiniteGradients as error:
            return step, str(error)
    raise AssertionError("five steps ran after a gradient of infinity in the third")


def plant_infinity(engine: Engine, steps: tuple[int, ...]) -> dict[str, int]:
    """Return a dict; a gradient is infinite while its ``step`` is one of the steps."""
    current = {"step": -1}
    weight = dict(engine.model.named_parameters())["embedding.weight"]
    weight.register_hook(lambda grad: torch.full_like(grad, torch.inf) if current["step"] in steps else None)
    return current


def moves_weights(engine: Engine, step: int) -> bool:
    """Run a step and return whether it changes any weight."""
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    engine.train_step(make_batch(engine.device, step))
    return not all(torch.equal(one, other) for one, other in zip(before, engine.model.parameters(), strict=True))
