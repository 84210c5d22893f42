"""Clipping by norm and by value, and what is written of skipped steps."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.training import batch_of, config_of, is_key_bias, shared_run
from torch import Tensor, nn

import colossus
from colossus.state.model_state_dict import full_state_dict

STEPS, NORM, VALUE = 3, 0.5, 0.004


def settings(parallel: dict[str, Any], kind: str = "1f1b", optimizer: Any = "SGD", **train: Any) -> dict[str, Any]:
    config = config_of(
        parallel,
        STEPS,
        "fp64",
        schedule=dict(type=kind, microbatches=2 if "pipeline" in parallel else 1),
        train=dict(clip_grad_norm=NORM, **train),
        lr_schedule=dict(type="constant", warmup_steps=0),
    )
    return {**config, "optimizer": dict(type=optimizer, lr=0.5)}


PLANS: dict[str, tuple[int, dict[str, Any], str]] = {
    "data": (2, dict(data=2), "1f1b"),
    "1d": (2, dict(tensor=dict(size=2)), "1f1b"),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), "1f1b"),
    "1f1b": (4, dict(data=2, pipeline=2), "1f1b"),
    "zb-v": (2, dict(pipeline=2), "zb-v"),
    "zero": (4, dict(data=2, pipeline=2, zero=3), "1f1b"),
}
plans = pytest.mark.parametrize("plan", [*PLANS.values()], ids=[*PLANS])


@cache
def plain_run() -> tuple[dict[str, Tensor], int]:
    """Plain torch in one process: weights at the end, and how many elements were clipped."""
    engine = colossus.initialize(settings({}))
    model = copy.deepcopy(engine.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    num_clipped = 0
    for step in range(STEPS):
        batch = batch_of(step)
        optimizer.zero_grad()
        logits, labels = model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten()
        F.cross_entropy(logits, labels, ignore_index=-100).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        num_clipped += sum(int((param.grad.abs() > VALUE).sum()) for param in model.parameters())  # type: ignore[union-attr]
        nn.utils.clip_grad_value_(model.parameters(), VALUE)
        optimizer.step()
    return full_state_dict(model, engine.context), num_clipped


@pytest.mark.rest("1f1b", "2d", "zero")
@plans
def test_clipping_by_norm_then_by_value(plan: tuple[int, dict[str, Any], str]) -> None:
    world, parallel, kind = plan
    trace = shared_run(world, settings(parallel, kind, clip_grad_value=VALUE), STEPS)[0]
    weights, num_clipped = plain_run()
    assert num_clipped > 1000
    for name, value in weights.items():
        if not is_key_bias(name):
            torch.testing.assert_close(trace.end[name], value, rtol=1e-9, atol=1e-12, msg=name)
