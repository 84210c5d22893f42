"""Training under every kind of plan against plain torch in one process on the same device, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.device_ranks import DeviceRanks
from helpers.plain_training import compare_traces, run_config, train_ours, train_plain
from helpers.training import Trace


@dataclass(frozen=True)
class Plan:
    """A plan, and with what it is tried.

    Attributes:
        more: sections of the config that change nothing.
        same: sections of the config that the run of plain torch has, too.
    """

    world: int
    parallel: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    same: dict[str, Any] = field(default_factory=dict)


def microbatches(kind: str, count: int = 3) -> dict[str, Any]:
    return dict(schedule=dict(type=kind, microbatches=count))


PLANS: dict[str, Plan] = {
    "one process": Plan(1, {}),
    "one process, accumulation": Plan(1, {}, microbatches("1f1b")),
    "one process, recomputation": Plan(1, {}, dict(train=dict(activation_checkpoint="full"))),
    "one process, selective recomputation": Plan(1, {}, dict(train=dict(activation_checkpoint="selective"))),
    "one process, Llama": Plan(
        1, {}, same=dict(model=dict(positions="rotary", norm="rmsnorm", mlp="swiglu", num_kv_heads=2, bias=False))
    ),
    "one process, SGD": Plan(1, {}, same=dict(optimizer=dict(type="SGD", lr=1e-2, momentum=0.9))),
    "data 2": Plan(2, dict(data=2), dict(comm=dict(bucket_mb=0.002))),
    "zero 1": Plan(2, dict(data=2, zero=1)),
    "zero 2": Plan(2, dict(data=2, zero=2)),
    "zero 3": Plan(2, dict(data=2, zero=3), microbatches("1f1b")),
    "zero 3 offloaded": Plan(2, dict(data=2, zero=dict(stage=3, offload=True))),
    "tensor 2": Plan(2, dict(tensor=2)),
    "tensor 2, tokens split": Plan(2, dict(tensor=dict(size=2, sequence_sharded=True))),
    "tensor 2, selective recomputation": Plan(2, dict(tensor=2), dict(train=dict(activation_checkpoint="selective"))),
    "sequence 2 ring": Plan(2, dict(sequence=dict(size=2, mode="ring"))),
    "sequence 2 ulysses": Plan(2, dict(sequence=dict(size=2, mode="ulysses"))),
    "pipeline 2 1f1b": Plan(2, dict(pipeline=2), microbatches("1f1b")),
    "pipeline 2 gpipe": Plan(2, dict(pipeline=2), microbatches("gpipe")),
    "pipeline 2 interleaved": Plan(2, dict(pipeline=2), microbatches("interleaved", 2)),
    "pipeline 2 zb-h1": Plan(2, dict(pipeline=2), microbatches("zb-h1")),
    "pipeline 2 zb-v": Plan(2, dict(pipeline=2), microbatches("zb-v")),
    "zero 3, copies on 2": Plan(4, dict(data=4, zero=dict(stage=3, shard=2))),
    "hierarchical": Plan(4, dict(data=4, strategy=dict(type="hierarchical", hosts=2))),
    "2d": Plan(4, dict(tensor=dict(mode="2d", size=4))),
    "data 2 x tensor 2": Plan(4, dict(data=2, tensor=2)),
    "sequence 4 ring": Plan(4, dict(sequence=dict(size=4, mode="ring"))),
    "sequence 4 hybrid": Plan(4, dict(sequence=dict(size=4, mode="hybrid"))),
    "sequence 2 x tensor 2": Plan(4, dict(sequence=2, tensor=2)),
    "pipeline 4 1f1b": Plan(4, dict(pipeline=4), microbatches("1f1b", 6)),
    "pipeline 2 x zero 2": Plan(4, dict(pipeline=2, data=2, zero=2), microbatches("zb-h1")),
    "2.5d": Plan(8, dict(tensor=dict(mode="2.5d", size=8, depth=2))),
    "3d": Plan(8, dict(tensor=dict(mode="3d", size=8))),
    "pipeline 2 x data 2 x tensor 2": Plan(8, dict(pipeline=2, data=2, tensor=2), microbatches("1f1b")),
    "pipeline 2 x 2d": Plan(8, dict(pipeline=2, tensor=dict(mode="2d", size=4)), microbatches("zb-v")),
    "zero 3 x 2d": Plan(8, dict(data=2, zero=3, tensor=dict(mode="2d", size=4))),
}


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, Trace]:
    """Return the runs of plain torch so far."""
    return {}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan(ranks: DeviceRanks, plain_runs: dict[str, Trace], figures: Callable[[Any], None], name: str) -> None:
    plan = PLANS[name]
    key = repr(plan.same)
    if key not in plain_runs:
        plain_runs[key] = ranks.run_one(train_plain, run_config(ranks, 1, {}, **plan.same))
    config = run_config(ranks, plan.world, plan.parallel, **plan.same, **plan.more)
    figures({"backend": ranks.backend(plan.world)})
    figures(compare_traces(ranks.run(plan.world, train_ours, config), plain_runs[key]))
