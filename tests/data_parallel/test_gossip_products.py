"""Gossip of whole replicas: with tensor and pipeline parallelism it is the simulation of one model per replica."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from helpers.gossip import Matrices, Simulated, irregular, simulate
from helpers.ranks import run_ranks
from helpers.training import SIZES, Trace, batch_of, config_of, run_plan
from torch import Tensor, nn

import colossus

STEPS, BATCH, CLIP, REPLICAS = 5, 12, 0.5, 2
SGD: dict[str, Any] = dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=0.02)
MATRICES = irregular(REPLICAS)
GRAPH = dict(graph=dict(type=Matrices, matrices=MATRICES))
#: strategy; what `simulate` is told
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgp": (dict(type="sgp", **GRAPH), {}),
    "osgp": (dict(type="sgp", overlap=2, **GRAPH), dict(overlap=2)),
    "d-psgd": (dict(type="d-psgd"), dict(combines_first=True)),
}
#: ranks; plan, schedule; what is between two replicas of a stage
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "1d": (4, dict(tensor=dict(size=2, sequence_sharded=True)), dict(type="1f1b", microbatches=2), 2),
    "pipeline": (4, dict(pipeline=2), dict(type="zb-h1", microbatches=3), 1),
    "2d": (8, dict(tensor=dict(size=4, mode="2d")), dict(type="1f1b", microbatches=1), 4),
}


def settings_of(plan: dict[str, Any], schedule: dict[str, Any]) -> dict[str, Any]:
    return config_of(
        plan,
        100,
        "fp64",
        schedule=schedule,
        train=dict(global_batch_size=BATCH, clip_grad_norm=CLIP),
        lr_schedule=dict(type="constant", warmup_steps=0),
        optimizer=SGD,
    )


def _start(rank: int) -> nn.Module:
    engine = colossus.initialize(settings_of({}, {}))
    engine.close()
    return engine.model


@cache
def start() -> nn.Module:
    return run_ranks(1, _start, with_context=False)[0]


def loss_of(model: nn.Module, step: int, replica: int) -> tuple[Tensor, Tensor]:
    part = slice(replica * BATCH // REPLICAS, (replica + 1) * BATCH // REPLICAS)
    batch = {key: value[part] for key, value in batch_of(step, SIZES, BATCH).items()}
    labels = batch["labels"].flatten()
    logits = model(batch["inputs"]).flatten(0, 1)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


@cache
def simulated(name: str) -> Simulated:
    strategy, more = STRATEGIES[name]
    half = np.full((REPLICAS, REPLICAS), 0.5)

    def matrix_of(step: int) -> np.ndarray:
        return MATRICES[step % len(MATRICES)] if "graph" in strategy else half

    return simulate(start(), matrix_of, REPLICAS, STEPS, SGD, loss_of, clip=CLIP, **more)


def trace_of(plan: str, name: str) -> list[Trace]:
    world, sizes, schedule, _ = PLANS[plan]
    config = settings_of({"data": REPLICAS, **sizes, "strategy": STRATEGIES[name][0]}, schedule)
    return run_plan(world, config, STEPS)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        pytest.param(plan, name, marks=() if (plan, name) == ("1d", "osgp") else pytest.mark.long)
        for plan in PLANS
        for name in STRATEGIES
    ],
)
def test_a_product_is_gossip_of_whole_replicas(plan: str, name: str) -> None:
    wanted = simulated(name)
    for rank, trace in enumerate(trace_of(plan, name)):
        replica = rank // PLANS[plan][3] % REPLICAS
        assert trace.losses == pytest.approx([of_step[replica] for of_step in wanted.losses], rel=1e-10)
        assert trace.norms == pytest.approx([of_step[replica] for of_step in wanted.norms], rel=1e-10)
        theirs = dict(wanted.models[replica].named_parameters())
        assert len(trace.end.keys() & theirs.keys()) >= 10
        for key in trace.end.keys() & theirs.keys():
            np.testing.assert_allclose(trace.end[key], theirs[key].detach(), rtol=1e-9, atol=1e-10, err_msg=key)
    one, other = (dict(model.named_parameters())["blocks.0.mlp.up.weight"] for model in wanted.models)
    assert (one - other).abs().max() > 1e-4
