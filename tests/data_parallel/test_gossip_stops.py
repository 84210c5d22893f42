"""A stop that travels with the messages of gossip: all ranks of all replicas leave after the same step."""

from __future__ import annotations

import signal
from functools import cache
from typing import Any

import pytest
from helpers.gossip import SGD, Flat, Matrices, irregular, part_of, settings_of, squares
from helpers.ranks import run_ranks

import colossus
from colossus.data_parallel.gossip.push_sum import StopRequest
from colossus.graphs.graph import Graph, make_graph

REPLICAS = 3
STEPS = 40
#: strategy; then of each stop its requests: (steps since the stop before, replica, signal)
CASES: dict[str, tuple[dict[str, Any], list[list[tuple[int, int, int | None]]]]] = {
    "exponential": (dict(type="sgp"), [[(0, 1, signal.SIGTERM)], [(3, 0, None)], [(2, 2, signal.SIGINT)]]),
    "ring, overlap 2": (
        dict(
            type="sgp", graph=dict(type=Matrices, matrices=[[[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]]), overlap=2
        ),
        # one after the other, and two at once, of which all learn the larger
        [[(0, 0, None)], [(1, 2, None), (2, 0, signal.SIGTERM)], [(1, 1, signal.SIGINT), (1, 0, signal.SIGTERM)]],
    ),
    "irregular, overlap 1": (
        dict(type="sgp", graph=dict(type=Matrices, matrices=irregular(REPLICAS)), overlap=1, peers=1),
        [[(4, 2, None)], [(0, 1, signal.SIGTERM)]],
    ),
    "d-psgd": (dict(type="d-psgd"), [[(0, 2, signal.SIGTERM)], [(2, 1, None)]]),
    # a sync point is one at which all hear of it
    "meets": (dict(type="sgp", log_every=5), [[(0, 0, signal.SIGTERM), (4, 2, None)], [(4, 1, signal.SIGINT)]]),
}


def _stops(rank: int) -> dict[str, tuple[list[tuple[int, int | None]], int]]:
    """Of each case the steps after which it stopped and the signals that were told; the steps of a run whose end is
    nearer than the stop."""
    told: dict[str, tuple[list[tuple[int, int | None]], int]] = {}
    for name, (strategy, stops) in CASES.items():
        engine = colossus.initialize(settings_of(strategy, REPLICAS, SGD), model=Flat, loss_fn=squares)
        found: list[tuple[int, int | None]] = []
        for requests in stops:
            begun = engine.completed_steps
            while engine.completed_steps < begun + STEPS:
                step = engine.completed_steps
                for after, replica, signum in requests:
                    if (step - begun, rank) == (after, replica):
                        engine.request_stop(signum)
                result = engine.train_step(part_of(step, rank))
                if result.stop_requested:
                    found.append((result.step - 1 - begun, result.stop_signal))
                    break
            engine.withdraw_stop()
        engine.close()
        engine = colossus.initialize(settings_of(strategy, REPLICAS, SGD, steps=4), model=Flat, loss_fn=squares)
        while engine.completed_steps < 4:
            if engine.completed_steps == 3 - rank % 2 and rank:
                engine.request_stop()
            if engine.train_step(part_of(0, rank)).stop_requested:
                break
        told[name] = found, engine.completed_steps
        engine.close()
    return told


@cache
def told() -> list[dict[str, tuple[list[tuple[int, int | None]], int]]]:
    return run_ranks(REPLICAS, _stops, with_context=False, timeout=10.0)


@pytest.mark.parametrize("name", CASES)
def test_all_replicas_stop_after_the_same_step(name: str) -> None:
    strategy, stops = CASES[name]
    of_ranks = [of_rank[name] for of_rank in told()]
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    found, last = of_ranks[0]
    assert last <= 4
    graph = make_graph(strategy.get("graph", "exponential"), REPLICAS, strategy.get("peers", 1))
    overlap, begun = strategy.get("overlap", 0), 0
    wanted = []
    for requests in stops:
        stops_after = [graph.heard_after(at, begun + after + 1, overlap) - begun for after, at, _ in requests]
        step = min(stops_after)
        signals = [signum for stop, (_, _, signum) in zip(stops_after, requests, strict=True) if stop == step]
        if "log_every" in strategy:
            first = min(after for after, _, _ in requests)
            meets = first + (-(begun + first + 1)) % 5
            if meets < step:  # all hear of what was requested up to then
                step, signals = meets, [signum for after, _, signum in requests if after <= meets]
        signum = max(signals, key=lambda each: (each is not None, each == signal.SIGTERM))
        wanted.append((step, signum))
        begun += step + 1
    assert found == wanted


# -- without ranks --------------------------------------------------------------------------------------------

GRAPHS: list[tuple[Any, int, Any, int]] = [
    ("exponential", 6, 2, 1),
    ("ring", 5, 1, 2),
    (dict(type="ring", directed=True), 4, 1, 1),
    ("star", 4, 1, 0),
    (dict(type=Matrices, matrices=irregular(4)), 4, 1, 1),
]


def _first_stops(graph: Graph, overlap: int, requests: dict[int, int], early: int = 0) -> list[int]:
    """The steps after which the replicas stop first, -1 for never; what they know does not depend on who is how fast.

    Args:
        requests: replica -> the step in which it requests a stop.
        early: steps by which it is named too early.
    """
    replicas = [StopRequest() for _ in range(graph.replicas)]
    sent: list[list[bytes]] = []
    stops: dict[int, int] = {}
    for step in range(max(requests.values()) + 40):
        sent.append([each.meta(1.0)[8:] for each in replicas])
        for index, each in enumerate(replicas):
            for source in graph.at(step - overlap).sources(index) if step >= overlap else ():
                each.hear(sent[step - overlap][source])
            if requests.get(index) == step:
                each.request(step, graph.heard_after(index, step + 1, overlap) - early, 1.0)
            if each.due(step):
                stops.setdefault(index, step)
    return [stops.get(index, -1) for index in range(graph.replicas)]


@pytest.mark.parametrize(("spec", "replicas", "peers", "overlap"), GRAPHS)
def test_all_stop_when_all_have_heard_of_it(spec: Any, replicas: int, peers: Any, overlap: int) -> None:
    """For every replica and step, and with another request meanwhile; named one step earlier, not all have heard."""
    graph = make_graph(spec, replicas, peers)
    for step in range(12):
        for index in range(replicas):
            wanted = graph.heard_after(index, step + 1, overlap)
            assert _first_stops(graph, overlap, {index: step}) == [wanted] * replicas
            assert len(set(_first_stops(graph, overlap, {index: step}, early=1))) > 1
            other, later = (index + 2) % replicas, step + 1 + (step + index) % (wanted - step)
            of_both = min(wanted, graph.heard_after(other, later + 1, overlap))
            assert _first_stops(graph, overlap, {index: step, other: later}) == [of_both] * replicas
