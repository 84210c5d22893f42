"""Steps on CUDA devices that do not exist: no tensor is on the wrong one, and nothing waits between logging steps."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_cuda import Waits, batch_on_device, run_fake_ranks
from helpers.training import BATCH, batch_of, config_of

import colossus

PLANS: dict[str, tuple[int, dict[str, Any], str]] = {
    "one": (1, dict(data=1), "fp32"),
    "data 2 x 3d": (16, dict(data=2, tensor=dict(mode="3d", size=8)), "bf16"),
    "zero 3": (2, dict(data=2, zero=3), "fp32"),
}


def body(rank: int, plan: dict[str, Any], precision: str) -> list[str]:
    engine = colossus.initialize(config_of(plan, 9, precision, device="cuda"))
    whole = batch_of(0)
    batch = batch_on_device({key: x[: BATCH // engine.context.size("data")] for key, x in whole.items()})
    engine.train_step(batch)
    with Waits(allowed=True) as waits:
        for _ in range(2):
            engine.train_step(batch)
    engine.close()
    return waits.found


@pytest.mark.parametrize("name", PLANS)
def test_a_step_waits_for_nothing(name: str) -> None:
    world, plan, precision = PLANS[name]
    assert run_fake_ranks(world, body, plan, precision) == [[]]
