"""Whole runs of strategies whose replicas do not wait for each other: they stop together, and are saved with nothing
under way."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from helpers.gossip import SGD, WIDTH, Flat, Net, _flat, classify, part_of, settings_of, squares
from helpers.ranks import RankError, run_ranks

import colossus
from colossus.engine.engine import Engine
from colossus.engine.fit import FitSummary, Hook, fit
from colossus.engine.results import StepResult

STRATEGY: dict[str, Any] = dict(type="ad-psgd")
STEPS = 40


class Stream:
    """A replica's samples, without end."""

    def __init__(self, replica: int) -> None:
        self.replica = replica

    def __iter__(self) -> Any:
        step = 0
        while True:
            yield part_of(step, self.replica)
            step += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class Pace(Hook):
    """Replicas are not as fast as each other, and some request a stop."""

    def __init__(self, seconds: float, stops_at: int | None) -> None:
        self.seconds, self.stops_at = seconds, stops_at

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        time.sleep(self.seconds)
        if result.step == self.stops_at:
            engine.request_stop()


#: seconds of a replica's step, and after which it requests a stop
STOPS: dict[str, dict[int, int]] = {"nobody": {}, "the slow one": {1: 3}, "two": {0: 9, 1: 2}}


def _fit(rank: int, stops: dict[int, int]) -> tuple[FitSummary, int, int]:
    settings = settings_of({**STRATEGY, "log_every": 30}, 2, SGD, steps=STEPS)
    data = dict(type=lambda: Stream(rank), per_rank=True)
    engine = colossus.initialize(settings, model=Net, loss_fn=classify, data=data)
    told: list[int] = []
    engine.strategy.on_progress = lambda: told.append(engine.completed_steps)
    summary = fit(engine, [Pace(0.02 if rank == 1 else 0.002, stops.get(rank))])
    completed = engine.completed_steps
    engine.close()
    return summary, completed, len(told)


def test_replicas_end_together() -> None:
    by_rank = run_ranks(2, lambda rank: [_fit(rank, stops) for stops in STOPS.values()], with_context=False)
    for number, (case, stops) in enumerate(STOPS.items()):
        found = [of_rank[number] for of_rank in by_rank]
        assert {completed for _, completed, _ in found} == {found[0][0].steps}, case
        assert {summary.reason for summary, *_ in found} == {"stopped" if stops else "finished"}, case
        assert min(stops.values(), default=STEPS) <= found[0][0].steps <= (30 if stops else STEPS), case
        assert len({summary.loss for summary, *_ in found}) == 1, case  # of all replicas
        assert found[0][2], case  # nothing is stuck, the fast one is told while it waits for the slow one


def _change_at_a_sync_point(rank: int) -> list[float]:
    engine = colossus.initialize(settings_of(STRATEGY, 2, dict(type="SGD", lr=1e-30)), Net, classify)
    params, store = [param for param in engine.model.parameters() if param.requires_grad], engine.context.store()
    engine.train_step(part_of(0, rank))
    engine.strategy.sync_point()
    with torch.no_grad():
        for param in params:
            param.fill_(1.0 + 2 * rank)
    if rank == 1:  # it would answer now with what it had when all met
        store.wait(["begun"])
        time.sleep(0.1)
    engine.train_step(part_of(1, rank))
    store.set("begun", "")
    engine.strategy.sync_point()
    values = _flat(params)
    engine.close()
    return [values.min(), values.max()]


def test_what_is_changed_where_all_meet_counts_in_the_next_average() -> None:
    assert run_ranks(2, _change_at_a_sync_point, with_context=False) == [[2.0, 2.0], [2.0, 2.0]]


def _die(rank: int) -> None:
    engine = colossus.initialize(settings_of(STRATEGY, 2, SGD), model=Net, loss_fn=classify)
    for step in range(5):
        engine.train_step(part_of(step, rank))
    if rank == 1:
        os._exit(3)
    engine.strategy.sync_point()


def test_who_waits_for_a_dead_replica_is_told() -> None:
    with pytest.raises(RankError, match=r"(?s)replica 1 has died: rank 1 \(replica 1\) has gone.*exit code 3"):
        run_ranks(2, _die, with_context=False)


def _own_loop(rank: int) -> tuple[float, tuple[str, int]]:
    """The first is faster, closes first, and in a second run fails: the sum of what each has when it closed, what the
    slow one is told, and in which step."""
    engine = colossus.initialize(settings_of(STRATEGY, 2, dict(type="SGD", lr=0.3)), model=Flat, loss_fn=squares)
    params = [param for param in engine.model.parameters() if param.requires_grad]
    with torch.no_grad():
        params[0].add_(float(rank))
    for step in range(4):
        time.sleep(0.1 * rank)
        engine.train_step(part_of(step, rank))
    engine.close()
    total = float(_flat(params).sum())
    engine = colossus.initialize(settings_of(STRATEGY, 2, SGD), model=Net, loss_fn=classify)
    step = 0
    try:
        for step in range(100):
            time.sleep(0.01 * rank)
            engine.train_step(part_of(step, rank))
            if (rank, step) == (0, 1):
                raise ZeroDivisionError("replica 0 fails")
    except (RuntimeError, ZeroDivisionError) as error:
        engine.close()
        return total, (str(error), step)
    raise AssertionError("nobody failed")


def test_a_replica_that_closes_first_waits_for_the_others() -> None:
    """But not one that fails."""
    (one, failed), (other, (text, step)) = run_ranks(2, _own_loop, with_context=False)
    # no gradient: what both began with, nothing lost
    start = torch.linspace(-1, 1, WIDTH).double().sum().item() + 0.25
    assert one + other == pytest.approx(2 * start + WIDTH, abs=1e-6)
    assert failed == ("replica 0 fails", 1)
    assert text.startswith("replica 0 has ended before this one: rank 0 (replica 0) has closed its links")
    assert step < 99
