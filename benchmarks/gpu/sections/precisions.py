"""Low precision in one process: each against fp32, loss scaling against torch's own, steps that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from helpers.training import batch_of, config_of, relative

import colossus
from benchmarks.gpu.section import Case, Figures
from colossus.engine.engine import Engine
from colossus.engine.nonfinite import NonFiniteGradients

STEPS = 30
MODEL: dict[str, Any] = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=53, seq_len=16)
FULL = dict(params="bf16", compute="bf16", reduce="fp32", optimizer="fp32")
PURE = dict(params="bf16", compute="bf16", reduce="bf16", optimizer="bf16")
#: how far the loss of any of the steps may be from that of fp32, relative
LOSS_GAPS: dict[str, tuple[Any, float]] = {
    "bf16": ("bf16", 1e-2),
    "fp16": ("fp16", 2e-3),
    "parameters in bf16, optimizer in fp32": (FULL, 2e-2),
    "all in bf16": (PURE, 1e-1),
}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    yield Case("fp32 is the CPU's", partial(_same_as_cpu, device))
    for name, (precision, allowed) in LOSS_GAPS.items():
        yield Case(name, partial(_near_fp32, device, precision, allowed))
    yield Case("fp16: the scale is torch's", partial(_loss_scale, device))
    for precision in ("fp32", "fp16"):
        yield Case(f"{precision}: a step that is not finite is skipped", partial(_skips, device, precision))
    yield Case("a step that is not finite ends the run", partial(_raises, device))


def engine_of(device: torch.device, precision: Any, **more: Any) -> Engine:
    more = {"lr_schedule": dict(type="constant", warmup_steps=0), **more}
    return colossus.initialize(config_of({}, STEPS, precision, model=MODEL, device=device.type, **more))


def batch(device: torch.device, step: int) -> dict[str, torch.Tensor]:
    """One of three: the loss falls."""
    return {key: value.to(device) for key, value in batch_of(step % 3, MODEL).items()}


def _losses(device: torch.device, precision: Any) -> list[float]:
    engine = engine_of(device, precision)
    results = [engine.train_step(batch(device, step)) for step in range(STEPS)]
    engine.close()
    return [result.loss for result in results]


def _same_as_cpu(device: torch.device) -> Figures:
    mine, wanted = _losses(device, "fp32"), _losses(torch.device("cpu"), "fp32")
    gap = max(map(relative, mine, wanted))
    assert gap < 1e-4, f"losses differ by {gap:.2g} of themselves: {mine} on {device}, {wanted} on the CPU"
    return {"loss gap": gap}


def _near_fp32(device: torch.device, precision: Any, allowed: float) -> Figures:
    mine, wanted = _losses(device, precision), _losses(device, "fp32")
    assert mine != wanted, "the losses are those of fp32 to the bit: nothing was computed in low precision"
    assert mine[-1] < 0.8 * mine[0], f"the loss does not fall: {mine}"
    gap = max(map(relative, mine, wanted))
    assert gap < allowed, f"losses differ by {gap:.2g} of themselves, {allowed} is allowed: {mine}, in fp32 {wanted}"
    return {"loss gap": gap, "first loss": mine[0], "last loss": mine[-1]}


def _loss_scale(device: torch.device) -> Figures:
    """Doubled after 3 steps without an overflow, halved by one, as `torch.amp.GradScaler` has it on this device."""
    overflows = (3, 4, 9)
    engine = engine_of(device, "fp16", train=dict(loss_scale=dict(init=1024.0, growth_interval=3)))
    theirs = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3)
    held = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = torch.optim.SGD([held], lr=0.1)
    at = _plant(engine, overflows)
    assert engine.loss_scaler is not None
    found, wanted = [], []
    for step in range(14):
        at["step"] = step
        before = _weights(engine)
        engine.train_step(batch(device, step))
        found.append(engine.loss_scaler.scale.item())
        is_same = all(torch.equal(one, other) for one, other in zip(before, _weights(engine), strict=True))
        assert is_same == (step in overflows), f"step {step}: the weights {'stayed' if is_same else 'moved'}"
        theirs.scale((held * (torch.inf if step in overflows else 1.0)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        wanted.append(theirs.get_scale())
    engine.close()
    assert found == wanted, f"the scales are {found}, of GradScaler {wanted}"
    return {"steps": 14, "overflows": len(overflows), "last scale": found[-1]}


def _skips(device: torch.device, precision: str) -> Figures:
    """The optimizer is told on the device; the weights stay as they are, and training goes on."""
    engine = engine_of(device, precision, train=dict(on_nonfinite="skip"))
    at = _plant(engine, (2,))
    for step in range(5):
        at["step"] = step
        before = _weights(engine)
        engine.train_step(batch(device, step))
        is_same = all(torch.equal(one, other) for one, other in zip(before, _weights(engine), strict=True))
        assert is_same == (step == 2), f"step {step}: the weights {'stayed' if is_same else 'moved'}"
        assert all(value.isfinite().all() for value in _weights(engine)), f"step {step}: weights are not finite"
    engine.close()
    return {"steps": 5, "skipped": 1}


def _raises(device: torch.device) -> Figures:
    """At the latest one step late, since nobody waits for the device."""
    engine = engine_of(device, "fp32")
    at = _plant(engine, (2,))
    for step in range(5):
        at["step"] = step
        raised = None
        try:
            engine.train_step(batch(device, step))
        except NonFiniteGradients as error:
            raised = str(error)
        if raised is not None:
            assert step in (2, 3), f"it came in step {step}"
            assert "embedding" in raised, f"the error does not name the parameter: {raised}"
            return {"steps late": step - 2}
    raise AssertionError("five steps ran after a gradient of infinity in the third")


def _plant(engine: Engine, steps: tuple[int, ...]) -> dict[str, int]:
    """A gradient is infinite when what is put into ``step`` is one of these."""
    at = {"step": -1}
    weight = dict(engine.model.named_parameters())["embedding.weight"]
    weight.register_hook(lambda grad: torch.full_like(grad, torch.inf) if at["step"] in steps else None)
    return at


def _weights(engine: Engine) -> list[torch.Tensor]:
    return [param.detach().clone() for param in engine.model.parameters()]
