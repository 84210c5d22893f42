"""A model with experts is the same run under every plan, the experts on one rank or spread over several."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.experts import config_of_experts
from helpers.laws import assert_parity
from helpers.long import but
from helpers.training import Trace, run_plan, shared_run

STEPS = 4

TENSOR_2D = dict(mode="2d", size=4)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "data2": (2, dict(data=2, expert=2)),
    "data4_expert2": (4, dict(data=4, expert=2)),
    "data4": (4, dict(data=4, expert=4)),
    "1d": (4, dict(data=2, tensor=2, expert=2)),
    "1d_alone": (2, dict(tensor=2)),
    "2d": (8, dict(data=2, tensor=TENSOR_2D, expert=2)),
    "3d": (8, dict(data=2, tensor=dict(mode="3d", shape=(2, 1, 2)), expert=2)),
    "pipeline": (4, dict(data=2, pipeline=2, expert=2)),
    "pipeline_with_bare_stages": (6, dict(data=2, pipeline=3, expert=2)),
    "pipeline_alone": (2, dict(pipeline=2)),
    "ring": (2, dict(sequence=2, expert=2)),
    "ring_data": (4, dict(sequence=2, data=2, expert=4)),
    "ring_data_only": (4, dict(sequence=2, data=2, expert=2)),
    "zero1": (4, dict(data=4, expert=2, zero=1)),
    "zero2": (4, dict(data=4, expert=2, zero=2)),
    "zero3": (4, dict(data=4, expert=2, zero=3)),
    "zero3_all": (2, dict(data=2, expert=2, zero=3)),
    "zero3_shard": (4, dict(data=4, expert=2, zero=dict(stage=3, shard=2))),
    "zero3_ring": (4, dict(data=2, sequence=2, expert=2, zero=3)),
}  # fmt: skip


def alone(kind: str = "experts", **more: Any) -> Trace:
    return shared_run(1, config_of_experts({}, STEPS, kind, **more), STEPS)[0]


def assert_is_one_process(plan: str, kind: str = "experts", **more: Any) -> None:
    world, parallel = PLANS[plan]
    traces = run_plan(world, config_of_experts(parallel, STEPS, kind, **more), STEPS)
    assert_parity(traces, alone(kind, **more), "fp64")


#: by default what the covering array of tests/test_parity.py has no level for: fewer ranks of experts than of data
DEFAULT = ("data4_expert2",)


@pytest.mark.parametrize("plan", but(PLANS.keys() - {*DEFAULT}, PLANS))
def test_every_plan_follows_the_one_process_run(plan: str) -> None:
    assert_is_one_process(plan, **(PIPELINE if "pipeline" in plan else {}))


PIPELINE: dict[str, Any] = dict(schedule=dict(type="1f1b", microbatches=2))
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "losses": ("data4_expert2", "experts_with_losses", {}),
    "losses_2d": ("2d", "experts_with_losses", {}),
    "losses_ring": ("ring_data", "experts_with_losses", {}),
    "losses_pipeline": ("pipeline_alone", "experts_with_losses", dict(schedule=dict(microbatches=4))),
    "losses_recomputed": ("1d", "experts_with_losses", dict(model=dict(activation_checkpoint="full"))),
    "selective": ("data2", "experts_with_losses", dict(model=dict(activation_checkpoint="selective"))),
    "interleaved": ("pipeline_alone", "experts_with_losses", dict(schedule=dict(type="interleaved", microbatches=4))),
    "zero3_losses": ("zero3", "experts_with_losses", {}),
}


@pytest.mark.parametrize("variant", but(VARIANTS.keys() - {"losses_pipeline", "selective"}, VARIANTS))
def test_losses_of_routers_are_those_of_one_process(variant: str) -> None:
    plan, kind, more = VARIANTS[variant]
    assert_is_one_process(plan, kind, **more)
