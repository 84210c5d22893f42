"""Synchronous gossip against a dense simulation in numpy, whose gradients and updates are plain torch's."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.gossip import ADAMW, SGD, Matrices, Run, irregular, loss_of, run_cases, settings_of, simulate, start
from torch import nn

from colossus.graphs.graph import make_graph

STEPS, REPLICAS, CLIP = 7, 3, 0.4
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
}


@cache
def begun() -> nn.Module:
    return start()


@cache
def runs() -> dict[str, list[Run]]:
    cases = {
        name: (settings_of(strategy, REPLICAS, optimizer, clip_grad_norm=clip), STEPS, dict(totals=True))
        for name, (strategy, optimizer, clip, _) in CASES.items()
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
        assert run.losses == pytest.approx([of_step[index] for of_step in wanted.losses], rel=1e-10)
        assert run.norms == pytest.approx([of_step[index] for of_step in wanted.norms], rel=1e-10)
        np.testing.assert_allclose(run.weights, [of_step[index] for of_step in wanted.weights], rtol=1e-14)
        for step in range(STEPS):
            np.testing.assert_allclose(run.z[step], wanted.z[step][index], rtol=1e-10, atol=1e-12)
    assert np.abs(wanted.z[-1][0] - wanted.z[-1][1]).max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_all_replicas_and_messages_sum_to_their_number(name: str) -> None:
    for run in runs()[name]:
        np.testing.assert_allclose(run.total_w, REPLICAS, rtol=1e-14)
