"""Dropout is the same under every plan: losses, every gradient and weight of one process with one microbatch."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.training import assert_same_numbers, assert_same_run, config_of, run_plan, shared_run

STEPS = 3
DROPPED = dict(dropout=0.2, attention_dropout=0.1)
FOUR = dict(schedule=dict(microbatches=4))
IN_SEQUENCE = dict(model=dict(attention_dropout=0.0))
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "microbatches": (1, {}, FOUR),
    "data": (2, dict(data=2), FOUR),
    "1d": (2, dict(tensor=2), {}),
    "1d sequence sharded": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), dict(schedule=dict(microbatches=2))),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), {}),
    "3d_2x1x2": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "3d": (8, dict(tensor=dict(mode="3d", size=8)), dict(schedule=dict(microbatches=2))),
    "data, 2d": (8, dict(data=2, tensor=dict(mode="2d", size=4)), {}),
    "ring": (2, dict(sequence=2), IN_SEQUENCE),
    "ulysses, 1d sharded": (
        4, dict(sequence=dict(size=2, mode="ulysses"), tensor=dict(size=2, sequence_sharded=True)), IN_SEQUENCE
    ),
    "1f1b": (2, dict(pipeline=2), FOUR),
    "zb-h1": (2, dict(pipeline=2), dict(schedule=dict(type="zb-h1", microbatches=4))),
    "zb-v, data": (4, dict(pipeline=2, data=2), dict(schedule=dict(type="zb-v", microbatches=2))),
    "zero 3": (2, dict(data=2, zero=3), {}),
    "full checkpoint": (2, dict(data=2), dict(train=dict(activation_checkpoint="full"), **FOUR)),
    "selective checkpoint": (2, dict(tensor=2), dict(train=dict(activation_checkpoint="selective"))),
    "zb-h1, checkpoint": (
        2, dict(pipeline=2), dict(train=dict(activation_checkpoint="full"), schedule=dict(type="zb-h1", microbatches=4))
    ),
}  # fmt: skip


def config(plan: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return config_of(plan, STEPS, "fp64", **{**more, "model": {**DROPPED, "num_layers": 4, **more.get("model", {})}})


@pytest.mark.rest()
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_drops_what_one_process_drops(name: str) -> None:
    world, plan, more = PLANS[name]
    reference = shared_run(1, config({}, {"model": more.get("model", {})}), STEPS)[0]
    for trace in run_plan(world, config(plan, more), STEPS):
        assert_same_run(trace, reference, loss=1e-10, norm=1e-10, parameter=1e-9)
        assert_same_numbers(trace, reference)
