"""Synchronous gossip against a dense simulation in numpy, whose gradients and updates are plain torch's."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.gossip import (
    ADAMW,
    SGD,
    Matrices,
    Run,
    irregular,
    loss_of,
    optimizer_state,
    run_cases,
    settings_of,
    simulate,
    start,
)
from torch import nn

from colossus.graphs.graph import make_graph

STEPS, REPLICAS, CLIP = 7, 3, 0.4
MIXED = dict(mix_optimizer_state=True)
IRREGULAR = dict(type=Matrices, matrices=irregular(REPLICAS))
#: strategy, optimizer, clipping; what `simulate` is told
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None, dict[str, Any]]] = {
    "sgp": (dict(type="sgp", graph=IRREGULAR), SGD, CLIP, {}),
    "overlap 1": (dict(type="sgp", graph=IRREGULAR, overlap=1), ADAMW, CLIP, dict(overlap=1)),
    "overlap 3": (dict(type="sgp", graph=IRREGULAR, overlap=3), SGD, None, dict(overlap=3)),
    "regular, overlap 1": (dict(type="sgp", overlap=1), SGD, None, dict(overlap=1)),
    "exponential": (dict(type="sgp"), ADAMW, None, {}),
    "d-psgd": (dict(type="d-psgd"), SGD, CLIP, dict(combines_first=True)),
    "d-psgd, AdamW": (dict(type="d-psgd", graph="complete"), ADAMW, None, dict(combines_first=True)),
    "d-psgd, adapted first": (dict(type="d-psgd", order="adapt_then_combine"), SGD, CLIP, {}),
    "state": (dict(type="sgp", graph=IRREGULAR, overlap=1, **MIXED), ADAMW, None, dict(overlap=1, mixes_state=True)),
    "state, skipped": (dict(type="sgp", graph=IRREGULAR, **MIXED), ADAMW, None, dict(mixes_state=True, skips=(0, 1))),
    "d-psgd, skipped": (
        dict(type="d-psgd", **MIXED),
        SGD,
        None,
        dict(combines_first=True, mixes_state=True, skips=(3, 2)),
    ),
}


@cache
def begun() -> nn.Module:
    return start()


@cache
def runs() -> dict[str, list[Run]]:
    cases = {
        name: (
            settings_of(strategy, REPLICAS, optimizer, clip_grad_norm=clip, on_nonfinite="skip"),
            STEPS,
            dict(totals=True, fails=more.get("skips")),
        )
        for name, (strategy, optimizer, clip, more) in CASES.items()
    }
    return run_cases(REPLICAS, cases)


@pytest.mark.parametrize("name", CASES)
def test_every_replica_is_the_dense_simulation(name: str) -> None:
    strategy, optimizer, clip, more = CASES[name]
    graph = make_graph(strategy.get("graph", "exponential"), REPLICAS)
    wanted = simulate(
        begun(), lambda step: graph.at(step).matrix, REPLICAS, STEPS, optimizer, loss_of, clip=clip, **more
    )
    for index, run in enumerate(runs()[name]):
        for step in range(STEPS):
            if (step, index) != more.get("skips"):
                assert run.losses[step] == pytest.approx(wanted.losses[step][index], rel=1e-10)
                assert run.norms[step] == pytest.approx(wanted.norms[step][index], rel=1e-10)
        np.testing.assert_allclose(run.weights, [of_step[index] for of_step in wanted.weights], rtol=1e-14)
        for step in range(STEPS):
            np.testing.assert_allclose(run.z[step], wanted.z[step][index], rtol=1e-10, atol=1e-12)
        theirs = optimizer_state(wanted.optimizers[index], wanted.models[index])
        assert run.optimizer.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(run.optimizer[key], value, rtol=1e-10, atol=1e-14)
    assert np.abs(wanted.z[-1][0] - wanted.z[-1][1]).max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_all_replicas_and_messages_sum_to_their_number(name: str) -> None:
    for run in runs()[name]:
        np.testing.assert_allclose(run.total_w, REPLICAS, rtol=1e-14)
