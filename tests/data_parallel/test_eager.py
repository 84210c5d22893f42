"""SGP whose messages are taken in as they come: nothing is lost, nobody waits, and memory has a bound."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.gossip import Net, _flat, classify, part_of, settings_of
from helpers.ranks import run_ranks
from helpers.split_net import Split

import colossus
from colossus.comm.objects import all_gather_object
from colossus.data_parallel.gossip.eager import LEAST_LEFT, MOST_AHEAD
from colossus.data_parallel.gossip.sgp import SGP
from colossus.engine.engine import Engine

STEPS, SLEEPER, ASLEEP = 22, 1, (3, 19)
STRATEGY: dict[str, Any] = dict(type="sgp", eager=True)
SGD = dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=0.03)
CASES: dict[str, Any] = {
    "four": (settings_of(STRATEGY, 4, SGD, clip_grad_norm=0.4), Net, True),
    "complete": (settings_of(dict(**STRATEGY, graph="complete", log_every=5), 4, SGD), Net, False),
    "tensor": (settings_of(dict(**STRATEGY, log_every=7), 2, SGD), Split, False),
}
CASES["tensor"][0]["parallel"]["tensor"] = dict(size=2, mode="1d")


@dataclass
class Run:
    """Of a rank: what its updates added to z, what it began with, x and w where all have met, and by step what it took
    in of whom."""

    begun: Any = None
    updates: list[np.ndarray] = field(default_factory=list)
    x: Any = None
    weight: float = 0.0
    total_weight: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    taken: list[tuple[int, ...]] = field(default_factory=list)
    most_waiting: int = 0
    reports: list[dict[str, float]] = field(default_factory=list)


def train(settings: dict[str, Any], model: Any, sleeps: bool) -> Run:
    engine = colossus.initialize(settings, model=model, loss_fn=classify)
    strategy, group, run = engine.strategy, engine.context.group("data"), Run()
    assert isinstance(strategy, SGP)
    assert strategy._eager is not None
    eager, params = strategy._eager, [param for param in engine.model.parameters() if param.requires_grad]
    z, run.begun = _flat(params), _flat(params)
    took = strategy.push_sum.take_update

    def take_update() -> None:
        run.updates.append(_flat(params) - z)
        took()

    strategy.push_sum.take_update = take_update  # type: ignore[method-assign]
    for step in range(STEPS):
        z = _flat(params)
        if sleeps:
            sleep(engine, run, group.index, step)
        elif (step + group.index) % 3 == 0:
            time.sleep(0.004)
        engine.train_step(part_of(step, group.index))
        run.weights.append(strategy.weight)
        run.taken.append(tuple(eager._taken))
        run.most_waiting = max(run.most_waiting, waiting(strategy))
        run.reports.append(strategy.report())
        if strategy.is_summed(step):
            run.total_weight.append(sum(all_gather_object(strategy.weight, group)))
    strategy.sync_point()
    views, run.weight = strategy.average_addend()
    run.x = _flat(views)
    run.total_weight.append(sum(all_gather_object(run.weight, group)))
    run.taken.append(tuple(eager._taken))
    engine.close()
    return run


def waiting(strategy: SGP) -> int:
    """Messages that have come, or are under way, from the one that has sent most of them."""
    links = strategy.links
    assert links is not None
    came = [source for source, kind, _ in links._inbox if kind == 1]
    return max((came.count(source) for source in came), default=0)


def sleep(engine: Engine, run: Run, replica: int, step: int) -> None:
    store = engine.context.store()
    store.set(f"began/{replica}/{step}", "")
    if replica == SLEEPER and step == ASLEEP[0]:
        keys = [f"began/{other}/{ASLEEP[1]}" for other in range(4) if other != replica]
        while not store.check(keys):
            time.sleep(0.005)
        time.sleep(0.05)  # what they have sent comes
        run.most_waiting = waiting(engine.strategy)  # type: ignore[arg-type]


@cache
def runs() -> dict[str, list[Run]]:
    by_rank = run_ranks(4, lambda rank: [train(*case) for case in CASES.values()], with_context=False)
    return {name: [of_rank[number] for of_rank in by_rank] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_no_mass_is_lost_and_the_sum_changes_by_the_updates(case: str) -> None:
    replicas, of_all = CASES[case][0]["parallel"]["data"], runs()[case]
    for run in of_all:
        np.testing.assert_allclose(run.total_weight, replicas, rtol=1e-13)
    num_ranks = 4 // replicas
    for index in range(num_ranks):
        of_shard = of_all[index::num_ranks]
        wanted = sum(run.begun + np.sum(run.updates, axis=0) for run in of_shard)
        np.testing.assert_allclose(sum(run.x for run in of_shard), wanted, rtol=0, atol=1e-12)
    assert any(abs(weight - 1) > 0.1 for run in of_all for weight in run.weights)
    assert np.abs(np.sum(of_all[0].updates, axis=0)).max() > 1e-2


def test_ranks_of_a_replica_take_in_the_same() -> None:
    first, second, third, fourth = runs()["tensor"]
    for one, other in ((first, second), (third, fourth)):
        assert one.taken == other.taken
        assert one.weights == other.weights
    assert first.taken[-1][1] > 3 < third.taken[-1][0]


def test_nobody_waits_for_a_sleeper_and_it_is_not_flooded() -> None:
    """The sleeper wakes when the others have begun a later step: who waited for it would wait for ever."""
    of_all = runs()["four"]
    assert 1 <= of_all[SLEEPER].most_waiting <= MOST_AHEAD
    assert of_all[SLEEPER].taken[-1].count(0) == 2  # from both others of the graph that send to it
    for case, kept in (("four", 1 / 2), ("complete", 1 / 4), ("tensor", 1 / 2)):
        for run in runs()[case]:
            assert min(run.weights) >= LEAST_LEFT * kept
            assert {"staleness", "exchanges", "push_sum_min"} <= set().union(*run.reports)
