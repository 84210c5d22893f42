"""Runs whose blocks are compiled, each by itself, beside one process that compiles nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.laws import assert_parity
from helpers.long import but
from helpers.training import SIZES, config_of, run_plan, shared_run

from colossus.models.gpt import GPT
from colossus.registry import MODELS

pytestmark = pytest.mark.usefixtures("compiler")


def compiled_gpt(**options: Any) -> GPT:
    torch._dynamo.reset()
    model = GPT(**options)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "zero 3": (2, dict(data=2, zero=3), {}),
    "ring": (2, dict(sequence=2), {}),
    "ulysses": (2, dict(sequence=dict(size=2, mode="ulysses")), {}),
    "pipeline": (2, dict(pipeline=2), dict(schedule=dict(microbatches=2))),
    "1d, sequence-sharded": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "1d, weights once a step": (2, dict(tensor=dict(size=2, weights="step")), dict(schedule=dict(microbatches=2))),
    "2d, checkpointing": (4, dict(tensor=dict(mode="2d", size=4)), dict(train=dict(activation_checkpoint="full"))),
    "3d": (8, dict(tensor=dict(mode="3d", size=8)), {}),
}


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"1d, sequence-sharded"}, PLANS))
def test_a_compiled_run_is_the_one_process_run(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "CompiledGPT", compiled_gpt)
    world, parallel, more = PLANS[plan]
    (reference,) = shared_run(1, config_of({}, 2, "fp64", model=dict(num_layers=1)), 2)
    config = config_of(parallel, 2, "fp64", **more, model=dict(type="CompiledGPT", **{**SIZES, "num_layers": 1}))
    assert_parity(run_plan(world, config, 2), reference, "fp64")
