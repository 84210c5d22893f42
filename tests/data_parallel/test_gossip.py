"""Synchronous gossip against a dense simulation in numpy, whose gradients and updates are plain torch's."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gossip import (
    ADAMW,
    SGD,
    WIDTH,
    Flat,
    Matrices,
    Run,
    Simulated,
    irregular,
    loss_of,
    optimizer_state,
    run_cases,
    settings_of,
    simulate,
    start,
)

from colossus.data_parallel.gossip.push_sum import PushSum
from colossus.data_parallel.parameter_vector import ParameterVector
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
    "skipped": (dict(type="sgp", graph=IRREGULAR), ADAMW, None, dict(skips=(0, 1))),
    "d-psgd, skipped": (dict(type="d-psgd"), SGD, None, dict(combines_first=True, skips=(3, 2))),
}


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


@cache
def simulated(name: str) -> Simulated:
    strategy, optimizer, clip, more = CASES[name]
    graph = make_graph(strategy.get("graph", "exponential"), REPLICAS, strategy.get("peers", 1))
    return simulate(start(), lambda step: graph.at(step).matrix, REPLICAS, STEPS, optimizer, loss_of, clip=clip, **more)


@pytest.mark.parametrize("name", CASES)
def test_every_replica_is_the_dense_simulation(name: str) -> None:
    wanted, more = simulated(name), CASES[name][3]
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
def test_sums_change_by_the_updates_alone(name: str) -> None:
    """Of x by the updates of all replicas, of w not at all, with what is in flight."""
    wanted = simulated(name)
    for run in runs()[name]:
        np.testing.assert_allclose(run.total_w, REPLICAS, rtol=1e-14)
        np.testing.assert_allclose(run.total_x, wanted.totals, rtol=1e-12, atol=1e-12)


# -- what it equals -------------------------------------------------------------------------------------------

SLOW = dict(type="SGD", lr=1e-9, weight_decay=0.0)
FOUR = 4
MIXES = dict(model=Flat, is_apart=True, totals=True)
FACTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    "exponential": (dict(type="sgp"), SLOW, 2, MIXES),
    "irregular": (dict(type="sgp", graph=dict(type=Matrices, matrices=irregular(FOUR)), log_every=5), SLOW, 36, MIXES),
    "in flight": (dict(type="sgp", graph=dict(type=Matrices, matrices=irregular(FOUR)), overlap=2), SLOW, 60, MIXES),
}


@cache
def facts(name: str, few: int | None = None) -> list[Run]:
    strategy, optimizer, steps, more = FACTS[name]
    return run_cases(FOUR, {name: (settings_of(strategy, FOUR, optimizer), few or steps, more)})[name]


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.rest("exponential", "in flight")
def test_mixing_alone_finds_the_mean(name: str) -> None:
    """By z = x / w; where w is not 1 x itself is elsewhere. The exponential graph is through in log2(4) steps."""
    of_all = facts(name)
    mean = np.mean([np.linspace(-1, 1, WIDTH).tolist() + [0.25]], axis=0) + (FOUR - 1) / 2
    for run in of_all:
        np.testing.assert_allclose(
            run.total_x, np.broadcast_to(mean * FOUR, (len(run.total_x), len(mean))), rtol=1e-13, atol=1e-13
        )
        np.testing.assert_allclose(run.total_w, FOUR, rtol=1e-14)
        is_biased = name != "exponential"
        np.testing.assert_allclose(run.z[-1], mean, rtol=1e-14, atol=2e-3 if is_biased else 0.0)
        assert (np.abs(run.z[-1] * run.weights[-1] - mean).max() > 0.05) == is_biased
        assert (run.weights[-1] != 1.0) == is_biased


def test_a_step_reports_weights_bytes_and_staleness() -> None:
    of_all, graph = facts("irregular"), make_graph(FACTS["irregular"][0]["graph"], FOUR)
    nbytes = 64  # 6 numbers of 8 bytes, aligned
    for index, run in enumerate(of_all):
        for step, report in enumerate(run.reports):
            assert report["push_sum_weight"] == run.weights[step]
            assert report["staleness"] == 0
            assert report["peer_bytes_sent"] == nbytes * len(graph.at(step).targets(index))
            assert report["peer_wait_seconds"] >= 0
        assert sum(report["peer_wait_seconds"] for report in run.reports) > 0
    assert {report["staleness"] for report in facts("in flight", 4)[0].reports} == {2}


@pytest.mark.parametrize("weight", [1 / 3, 0.012, 1.7])
def test_an_update_is_added_to_x_and_no_update_adds_nothing(weight: float) -> None:
    """In float32 z times w is not x; the difference that is added to x is of z, and exactly 0."""
    param = torch.linspace(-1, 1, 997) / 3
    held = PushSum(ParameterVector([param]))
    held.mix(weight, [])
    assert held.x is not None
    before = held.x.clone()
    for _ in range(5):
        held.take_update()
        held.debias()
    assert torch.equal(held.x, before)
    param += 3.0
    held.take_update()
    torch.testing.assert_close(held.vector.views(held.x)[0], held.vector.views(before)[0] + 3.0, rtol=0, atol=1e-6)
