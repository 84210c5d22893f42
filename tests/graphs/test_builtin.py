"""Graphs of colossus: their matrices, what they conserve, and that the exponential ones reach the exact mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.graph_checks import problems_of, two_sides
from colossus.graphs.spec import make_family

SPECS: list[Any] = [
    "complete",
    "ring",
    {"type": "ring", "directed": True},
    "star",
    "torus",
    {"type": "torus", "rows": 3},
    "linear",
    "exponential",
    "bipartite_exponential",
    {"type": "hierarchical", "per_host": 3},
    {"type": "hierarchical", "per_host": 2, "between": "ring"},
    {"type": "hierarchical", "per_host": 2, "between": {"type": "hierarchical", "per_host": 2, "between": "star"}},
]


def all_that_fit(most_replicas: int) -> list[tuple[Any, int, int]]:
    found = []
    for spec in SPECS:
        for replicas in range(2, most_replicas + 1):
            family = make_family(spec)
            if not family.problems(replicas):
                most = family.most_peers(replicas) if family.takes_peers else 1
                found += [(spec, replicas, peers) for peers in range(1, most + 1)]
    return found


FITTING = all_that_fit(16)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_all_are_right(spec: Any) -> None:
    """Doubly stochastic and connected for each number of replicas and peers; everybody keeps something of its own."""
    for fits, replicas, peers in FITTING:
        if fits is spec:
            graph = make_graph(spec, replicas, peers)
            assert problems_of(graph, doubly_stochastic=True, late="overlap") == [], (replicas, peers)
            for step in range(2 * graph.period):
                assert (graph.at(step).matrix >= 0).all()
                sent = [len(graph.at(step).targets(index)) for index in range(replicas)]
                if graph.family.takes_peers and "hierarchical" not in str(spec):
                    assert max(sent) <= peers, (replicas, peers, step)


def sum_of_messages(graph: Graph, step: int, x: np.ndarray) -> np.ndarray:
    """Through what replicas see: whom they send to and what they keep, never the matrix."""
    at = graph.at(step)
    out = np.array([at.keeps(index) * x[index] for index in range(graph.replicas)])
    for source in range(graph.replicas):
        for to, weight in at.targets(source):
            assert source in at.sources(to)
            out[to] += weight * x[source]
    return out


@pytest.mark.parametrize(
    ("replicas", "peers", "steps"), [(2, 1, 1), (4, 1, 2), (8, 1, 3), (32, 1, 5), (9, 2, 2), (27, 2, 3), (16, 3, 2)]
)
def test_exponential_reaches_the_exact_mean(replicas: int, peers: int, steps: int) -> None:
    graph = make_graph("exponential", replicas, peers)
    assert graph.period == steps
    x = np.random.default_rng(0).normal(size=replicas)
    mean = x.mean()
    for step in range(steps):
        assert abs(x - mean).max() > 1e-3
        x = sum_of_messages(graph, step, x)
    assert abs(x - mean).max() < 1e-15


def test_bipartite_exponential_is_pairs() -> None:
    """Each step a matching between odd and even ones, which over the period are more than neighbours."""
    for replicas in (2, 4, 6, 12, 32):
        graph = make_graph("bipartite_exponential", replicas)
        edges = np.zeros((replicas, replicas), bool)
        for step in range(graph.period):
            matrix = graph.at(step).matrix
            edges |= matrix != 0
            assert (matrix == matrix.T).all()
            for index in range(replicas):
                ((to, weight),) = graph.at(step).targets(index)
                assert (weight, (to - index) % 2) == (0.5, 1)
        assert two_sides(edges) == (list(range(0, replicas, 2)), list(range(1, replicas, 2)))
    assert graph.period == 10  # 1, 3, 5, 9, 17 hops, each way
    assert {to for step in range(10) for to, _ in graph.at(step).targets(1)} == {2, 0, 4, 30, 6, 28, 10, 24, 18, 16}


def test_hierarchical_is_inside_and_between_in_turn() -> None:
    graph = make_graph({"type": "hierarchical", "per_host": 3}, 12)
    assert [to for to, _ in graph.at(0).targets(4)] == [3, 5]
    assert [graph.at(step).targets(4)[0][0] for step in (1, 3)] == [7, 10]
    x = np.random.default_rng(0).normal(size=12)
    mean = x.mean()
    for step in range(4):  # 4 hosts: exact after two steps between them
        x = sum_of_messages(graph, step, x)
    assert abs(x - mean).max() < 1e-15


def test_one_replica() -> None:
    for spec in SPECS:
        graph = make_graph(spec, 1, 3)
        assert (graph.at(5).keeps(0), graph.at(5).targets(0)) == (1.0, [])
