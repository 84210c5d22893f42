"""Training under every kind of plan, its ranks on one device: the run of one process on the CPU, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.ranks import RankPool
from benchmarks.gpu.section import Case, Figures
from benchmarks.gpu.trained import References, compare, run_of, traced


@dataclass(frozen=True)
class Plan:
    """A plan, and with what it is tried.

    Attributes:
        same: of the config, what changes the run of one process, too.
        more: of the config, what does not.
    """

    world: int
    parallel: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    same: dict[str, Any] = field(default_factory=dict)


def _microbatches(kind: str, count: int = 3) -> dict[str, Any]:
    return dict(schedule=dict(type=kind, microbatches=count))


PLANS: dict[str, Plan] = {
    "one process": Plan(1, {}),
    "one process, accumulation": Plan(1, {}, _microbatches("1f1b")),
    "one process, recomputation": Plan(1, {}, dict(train=dict(activation_checkpoint="full"))),
    "one process, selective recomputation": Plan(1, {}, dict(train=dict(activation_checkpoint="selective"))),
    "one process, Llama": Plan(
        1, {}, same=dict(model=dict(positions="rotary", norm="rmsnorm", mlp="swiglu", num_kv_heads=2, bias=False))
    ),
    "one process, SGD": Plan(1, {}, same=dict(optimizer=dict(type="SGD", lr=1e-2, momentum=0.9))),
    "data 2": Plan(2, dict(data=2), dict(comm=dict(bucket_mb=0.002))),
    "zero 1": Plan(2, dict(data=2, zero=1)),
    "zero 2": Plan(2, dict(data=2, zero=2)),
    "zero 3": Plan(2, dict(data=2, zero=3), _microbatches("1f1b")),
    "zero 3 offloaded": Plan(2, dict(data=2, zero=dict(stage=3, offload=True))),
    "tensor 2": Plan(2, dict(tensor=2)),
    "tensor 2, tokens split": Plan(2, dict(tensor=dict(size=2, sequence_sharded=True))),
    "tensor 2, selective recomputation": Plan(2, dict(tensor=2), dict(train=dict(activation_checkpoint="selective"))),
    "sequence 2 ring": Plan(2, dict(sequence=dict(size=2, mode="ring"))),
    "sequence 2 ulysses": Plan(2, dict(sequence=dict(size=2, mode="ulysses"))),
    "pipeline 2 1f1b": Plan(2, dict(pipeline=2), _microbatches("1f1b")),
    "pipeline 2 gpipe": Plan(2, dict(pipeline=2), _microbatches("gpipe")),
    "pipeline 2 interleaved": Plan(2, dict(pipeline=2), _microbatches("interleaved", 2)),
    "pipeline 2 zb-h1": Plan(2, dict(pipeline=2), _microbatches("zb-h1")),
    "pipeline 2 zb-v": Plan(2, dict(pipeline=2), _microbatches("zb-v")),
    "zero 3, copies on 2": Plan(4, dict(data=4, zero=dict(stage=3, shard=2))),
    "hierarchical": Plan(4, dict(data=4, strategy=dict(type="hierarchical", hosts=2))),
    "2d": Plan(4, dict(tensor=dict(mode="2d", size=4))),
    "data 2 x tensor 2": Plan(4, dict(data=2, tensor=2)),
    "sequence 4 ring": Plan(4, dict(sequence=dict(size=4, mode="ring"))),
    "sequence 4 hybrid": Plan(4, dict(sequence=dict(size=4, mode="hybrid"))),
    "sequence 2 x tensor 2": Plan(4, dict(sequence=2, tensor=2)),
    "pipeline 4 1f1b": Plan(4, dict(pipeline=4), _microbatches("1f1b", 6)),
    "pipeline 2 x zero 2": Plan(4, dict(pipeline=2, data=2, zero=2), _microbatches("zb-h1")),
    "2.5d": Plan(8, dict(tensor=dict(mode="2.5d", size=8, depth=2))),
    "3d": Plan(8, dict(tensor=dict(mode="3d", size=8))),
    "pipeline 2 x data 2 x tensor 2": Plan(8, dict(pipeline=2, data=2, tensor=2), _microbatches("1f1b")),
    "pipeline 2 x 2d": Plan(8, dict(pipeline=2, tensor=dict(mode="2d", size=4)), _microbatches("zb-v")),
    "zero 3 x 2d": Plan(8, dict(data=2, zero=3, tensor=dict(mode="2d", size=4))),
}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    pool, references = RankPool(device), References()
    for name, plan in PLANS.items():
        yield Case(name, partial(check_plan, pool, references, plan), seconds=75)
    pool.close()
    references.close()


def check_plan(pool: RankPool, references: References, plan: Plan) -> Figures:
    config = run_of(plan.parallel, pool.device, pool.backend, **plan.same, **plan.more)
    return compare(pool.run(plan.world, traced, config), references.get(**plan.same))
