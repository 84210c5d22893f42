"""Steps on CUDA devices that do not exist: no tensor is on the wrong one, and nothing waits between logging steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.fake_cuda import Waits, batch_on_device, run_fake_ranks
from helpers.fake_cuda.pretend import pretend
from helpers.training import BATCH, batch_of, config_of
from torch import distributed as dist
from torch._subclasses import fake_tensor

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


@pytest.mark.rest("data 2 x 3d")
@pytest.mark.parametrize("name", PLANS)
def test_a_step_waits_for_nothing(name: str) -> None:
    world, plan, precision = PLANS[name]
    assert run_fake_ranks(world, body, plan, precision) == [[]]


def of_this_process() -> list[Any]:
    """What a fake rank changes for itself."""
    kinds = (torch.cuda, torch.Tensor, fake_tensor.FakeTensor, fake_tensor)
    named = [{name: id(value) for name, value in vars(kind).items()} for kind in kinds]
    backends = [*dist.Backend.backend_list], dict(dist.Backend.default_device_backend_map)
    return [*named, backends, torch.accelerator.current_accelerator(), torch.Generator, dict(os.environ)]


def test_the_process_of_the_tests_stays_as_it_was() -> None:
    before = of_this_process()
    assert run_fake_ranks(1, lambda rank: str(torch.accelerator.current_accelerator())) == ["cuda"]
    assert of_this_process() == before
    with pytest.raises(AssertionError, match="only a forked process"):
        pretend()
