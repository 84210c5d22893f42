"""Replicas that exchange weights or gradients train the same on the device as on the CPU.

`tests/data_parallel` compares the runs on the CPU with plain torch; those that sum gradients are in `test_plans`, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.device_ranks import DeviceRanks
from helpers.plain_training import run_config, train_ours
from helpers.training import Trace, relative

STEPS, REPLICAS = 6, 4
#: steps between sync points
PERIOD = 3
STRATEGIES: dict[str, dict[str, Any]] = {
    "all_reduce": dict(type="all_reduce"),
    "all_reduce bf16": dict(type="all_reduce", compress="bf16"),
    "all_reduce powersgd": dict(type="all_reduce", compress="powersgd", rank=4, start_step=2),
    "hierarchical": dict(type="hierarchical", hosts=2),
    "sgp": dict(type="sgp"),
    "d-psgd": dict(type="d-psgd", graph="ring"),
    "local_sgd": dict(type="local_sgd", period=PERIOD),
    "slowmo": dict(type="slowmo", period=PERIOD),
    "diloco": dict(type="diloco", period=PERIOD),
}
#: in which order replicas hear of each other is a matter of time: these have to learn
BY_ARRIVAL: dict[str, dict[str, Any]] = {
    "sgp overlap 1": dict(type="sgp", overlap=1),
    "ad-psgd": dict(type="ad-psgd"),
}
#: allowed relative gaps of losses: compression may round the other way
ALLOWED = {"all_reduce bf16": 1e-4, "all_reduce powersgd": 1e-6}


def train_replicas(ranks: DeviceRanks, strategy: dict[str, Any]) -> list[Trace]:
    plan = dict(data=REPLICAS, strategy=strategy)
    config = run_config(ranks, REPLICAS, plan, optimizer=dict(lr=1e-2), lr_schedule=dict(warmup_steps=2))
    return ranks.run(REPLICAS, train_ours, config, STEPS)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_the_cpus(
    ranks: DeviceRanks, host_ranks: DeviceRanks, figures: Callable[[Any], None], name: str
) -> None:
    mine, expected = (train_replicas(where, STRATEGIES[name]) for where in (ranks, host_ranks))
    gaps = [
        relative(loss, other)
        for trace, reference in zip(mine, expected, strict=True)
        for loss, other in zip(trace.losses, reference.losses, strict=True)
    ]
    figures({"loss gap": max(gaps)})
    allowed = ALLOWED.get(name, 1e-9)
    assert max(gaps) <= allowed, f"losses differ by {max(gaps):.2g} of themselves, {allowed} is allowed"


@pytest.mark.parametrize("name", BY_ARRIVAL)
def test_a_strategy_runs(ranks: DeviceRanks, figures: Callable[[Any], None], name: str) -> None:
    traces = train_replicas(ranks, BY_ARRIVAL[name])
    first, last = (sum(trace.losses[step] for trace in traces) / REPLICAS for step in (0, -1))
    figures({"first loss": first, "last loss": last})
    assert all(value.isfinite().all() for trace in traces for value in trace.end.values())
