"""Gossip that stops and goes on: what is in flight is received and saved, and the run is the same bit for bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gossip import ADAMW, SGD, Flat, Matrices, Net, classify, irregular, part_of, settings_of, squares
from helpers.ranks import RankError, run_ranks

import colossus
from colossus.checkpoint.folder import name_of
from colossus.engine.engine import Engine

REPLICAS, HALF = 3, 4
IRREGULAR = dict(type=Matrices, matrices=irregular(REPLICAS))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgp": (dict(type="sgp", graph=IRREGULAR), SGD),
    "in flight": (dict(type="sgp", graph=IRREGULAR, overlap=2), ADAMW),
    "d-psgd": (dict(type="d-psgd"), SGD),
}
Rows = list[tuple[Any, ...]]


def _walk(engine: Engine, steps: int) -> Rows:
    """Of each step all that a replica is, to the bit."""
    rows: Rows = []
    for _ in range(steps):
        result = engine.train_step(part_of(engine.completed_steps, engine.context.index("data")))
        strategy: Any = engine.strategy
        state = [value.numpy().tobytes() for of in engine.optimizer.state.values() for _, value in sorted(of.items())]
        z = b"".join(param.detach().numpy().tobytes() for param in engine.model.parameters())
        held = strategy.push_sum
        x = [] if held.x is None else [view.numpy().tobytes() for view in held.vector.views(held.x)]
        rows.append((result.loss, result.grad_norm, strategy.weight, z, x, state))
    return rows


def _stopped(rank: int, name: str, root: Path) -> tuple[Rows, Rows, Rows, Rows, int]:
    """A run, the second half of one that is saved, of one that goes on with that, and of the first made again; what the
    folder has of what was in flight."""
    strategy, optimizer = CASES[name]
    settings: dict[str, Any] = settings_of(strategy, REPLICAS, optimizer)
    settings["checkpoint"] = dict(dir=str(root / name), keep_last=0)
    through = colossus.initialize(settings, model=Net, loss_fn=classify)
    saved = colossus.initialize(settings, model=Net, loss_fn=classify)
    whole = _walk(through, 2 * HALF)
    _walk(saved, HALF)
    saved.checkpoints.save(background=False).wait()
    goes_on = _walk(saved, HALF)
    saved.close()
    resumed = colossus.initialize(settings, model=Net, loss_fn=classify)
    resumed.checkpoints.load(root / name / name_of(HALF))
    held = len(resumed.strategy.in_flight)
    again = _walk(resumed, HALF)
    resumed.close()
    # goes back, with messages of later steps under way, and back to the step that it last made
    through.checkpoints.load(root / name / name_of(HALF))
    _walk(through, 1)
    through.checkpoints.load(root / name / name_of(HALF))
    back = _walk(through, HALF)
    through.close()
    return whole[HALF:], goes_on, again, back, held


@pytest.mark.parametrize("name", CASES)
@pytest.mark.rest("sgp")
def test_stopped_and_resumed_is_the_run_through(name: str, tmp_path: Path) -> None:
    overlap, told = CASES[name][0].get("overlap", 0), run_ranks(REPLICAS, _stopped, name, tmp_path, with_context=False)
    for whole, goes_on, again, back, held in told:
        assert (held > 0) == (overlap > 0)
        assert goes_on == whole
        assert again == whole
        assert back == whole
    one, other = (np.frombuffer(of_rank[0][-1][3], np.float64) for of_rank in told[:2])
    assert np.abs(one - other).max() > 1e-3


def _frozen(rank: int, root: Path) -> list[tuple[Rows, Rows]]:
    """A run in which a parameter is frozen on the way, and the steps after its checkpoint made again."""
    told = []
    cases = (dict(type="sgp", overlap=1), dict(type="d-psgd"), dict(type="ad-psgd"))
    for strategy in cases:
        settings: dict[str, Any] = settings_of(strategy, 2, ADAMW)
        settings["checkpoint"] = dict(dir=str(root / strategy["type"]), keep_last=0)
        engine = colossus.initialize(settings, model=Net, loss_fn=classify)
        for step in range(2):
            engine.train_step(part_of(step, rank))
        engine.model.up.weight.requires_grad_(False)
        engine.train_step(part_of(2, rank))
        engine.checkpoints.save(background=False).wait()
        if strategy["type"] != "ad-psgd":
            usual = _walk(engine, 3)
            engine.checkpoints.load(root / strategy["type"] / name_of(3))
            told.append((usual, _walk(engine, 3)))
        engine.close()
    return told


def test_a_parameter_may_be_frozen_on_the_way(tmp_path: Path) -> None:
    """What was trained at first is mixed to the end."""
    for of_rank in run_ranks(2, _frozen, tmp_path, with_context=False):
        for usual, again in of_rank:
            assert again == usual


# -- stops ----------------------------------------------------------------------------------------------------

RING = [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]
TERM, INT = signal.SIGTERM, signal.SIGINT
#: strategy; then of each stop its requests: (steps since the stop before, replica, signal)
STOPS: dict[str, tuple[dict[str, Any], list[list[tuple[int, int, int | None]]]]] = {
    "exponential": (dict(type="sgp"), [[(0, 1, TERM)], [(3, 0, None)], [(2, 2, INT)]]),
    "ring, overlap 2": (
        dict(type="sgp", graph=dict(type=Matrices, matrices=[RING]), overlap=2),
        [[(0, 0, None)], [(1, 2, None), (2, 0, TERM)], [(1, 1, INT), (1, 0, INT)]],
    ),
    "d-psgd": (dict(type="d-psgd"), [[(0, 2, TERM)], [(2, 1, None)]]),
    # a sync point is one at which all hear of it
    "meets": (dict(type="sgp", log_every=5), [[(0, 0, TERM), (4, 2, None)], [(4, 1, INT)]]),
}


def _stops(rank: int) -> dict[str, tuple[list[tuple[int, int | None]], int]]:
    """Of each case the steps after which it stopped, with the signals; the steps of a run of four in which one
    replica requests a stop in the last but one."""
    found = {}
    for name, (strategy, stops) in STOPS.items():
        engine = colossus.initialize(settings_of(strategy, REPLICAS, SGD), model=Flat, loss_fn=squares)
        ends = []
        for requests in stops:
            begun, result = engine.completed_steps, None
            while result is None or not (result.stop_requested or result.step > begun + 40):
                step = engine.completed_steps
                for after, replica, signum in requests:
                    if (step - begun, rank) == (after, replica):
                        engine.request_stop(signum)
                result = engine.train_step(part_of(step, rank))
            ends.append((result.step - 1 - begun, result.stop_signal))
            engine.withdraw_stop()
        engine.close()
        engine = colossus.initialize(settings_of(strategy, REPLICAS, SGD, steps=4), model=Flat, loss_fn=squares)
        while engine.completed_steps < 4:
            if (engine.completed_steps, rank) == (2, 1):
                engine.request_stop()
            if engine.train_step(part_of(0, rank)).stop_requested:
                break
        found[name] = ends, engine.completed_steps
        engine.close()
    return found


@pytest.mark.long
def test_all_replicas_stop_after_the_same_step() -> None:
    """Also those that wait for a message of one that has requested a stop, and so sends none."""
    found, *others = run_ranks(REPLICAS, _stops, with_context=False, timeout=20.0)
    assert others == [found, found]
    for name, (_, stops) in STOPS.items():
        ends, last = found[name]
        assert last in (3, 4), name
        for requests, (step, signum) in zip(stops, ends, strict=True):
            first = min(after for after, _, _ in requests)
            assert first <= step < first + 12, name
            assert signum in [each for _, _, each in requests], name


# -- failures -------------------------------------------------------------------------------------------------


def _dying(rank: int) -> None:
    engine = colossus.initialize(settings_of(dict(type="sgp"), REPLICAS, SGD), model=Net, loss_fn=classify)
    for step in range(20):
        if (rank, step) == (1, 3):
            os._exit(7)
        engine.train_step(part_of(step, rank))


def test_a_replica_that_dies_is_named() -> None:
    """And the log has the message that was awaited."""
    with pytest.raises(RankError) as raised:
        run_ranks(REPLICAS, _dying, with_context=False)
    told = str(raised.value)
    assert "rank 1 ---\ndied without a word (exit code 7)" in told
    assert "replica 1 has died: rank 1 (replica 1) has gone: its connection was closed" in told
    assert "Start the run again from its last checkpoint" in told
    assert re.search(r"message of step [45] from rank 1 \(replica 1\) over data .* WAITING", told)


def path(replicas: int, step: int) -> np.ndarray:
    """There and back, doubly stochastic, with another weight in the last process."""
    weight = 0.25 if int(os.environ["TEST_RANK"]) < replicas - 1 else 0.3
    matrix = np.eye(replicas)
    for one in range(replicas - 1):
        matrix[one : one + 2, one : one + 2] += weight * np.array([[-1, 1], [1, -1]])
    return matrix


def _refusals(rank: int) -> list[str]:
    os.environ["TEST_RANK"] = str(rank)
    said = []
    for kind in ("sgp", "d-psgd", "ad-psgd"):
        with pytest.raises(ValueError, match="has got other matrices") as caught:
            colossus.initialize(settings_of(dict(type=kind, graph=path), REPLICAS, SGD), model=Net, loss_fn=classify)
        said.append(str(caught.value))
    return said


def test_a_graph_that_differs_between_processes_is_refused_on_all() -> None:
    for said in run_ranks(REPLICAS, _refusals, with_context=False):
        assert all(line.startswith("parallel.strategy.graph: rank 2 has got other matrices than") for line in said)
