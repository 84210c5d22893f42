"""Contraction and steps to consensus, against mixing itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colossus.graphs.analysis import contraction, mixing, product
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.graph_checks import problems_of

IRREGULAR = [[0.5, 0.2, 0.25], [0.5, 0.6, 0], [0, 0.2, 0.75]]


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [("ring", 5), ("star", 6), ("linear", 7), ("torus", 12), ("exponential", 6), ("bipartite_exponential", 10)],
)
def test_measured_contraction_is_the_norm(spec: str, replicas: int) -> None:
    """The worst start, found by power iteration through the mixing itself, shrinks by the norm, all others by more."""
    graph = make_graph(spec, replicas)
    found = contraction(graph)
    draws = np.random.default_rng(3)
    start = draws.normal(size=replicas)
    for _ in range(500):
        start -= start.mean()
        start /= np.linalg.norm(start)
        end = mix(graph, start)
        start = mix_back(graph, end - end.mean())
    start /= np.linalg.norm(start)
    measured = np.linalg.norm(mix(graph, start) - start.mean()) / np.linalg.norm(start)
    assert found.is_doubly_stochastic
    assert measured == pytest.approx(found.norm, rel=1e-9)
    assert 0.01 < found.norm < 1
    for _ in range(20):
        x = draws.normal(size=replicas)
        x -= x.mean()
        assert np.linalg.norm(mix(graph, x)) <= found.norm * np.linalg.norm(x) * (1 + 1e-12)
    assert found.eigenvalue <= found.norm + 1e-12  # equal where the product is normal


def mix(graph: Graph, x: np.ndarray) -> np.ndarray:
    for step in range(graph.period):
        at = graph.at(step)
        out = np.array([at.keeps(index) * x[index] for index in range(graph.replicas)])
        for source in range(graph.replicas):
            for to, weight in at.targets(source):
                out[to] += weight * x[source]
        x = out
    return x


def mix_back(graph: Graph, x: np.ndarray) -> np.ndarray:
    for step in reversed(range(graph.period)):
        x = graph.at(step).matrix.T @ x
    return x


def test_known_eigenvalues() -> None:
    ring = contraction(make_graph("ring", 6))
    assert ring.norm == pytest.approx((1 + 2 * np.cos(2 * np.pi / 6)) / 3)
    assert ring.eigenvalue == pytest.approx(ring.norm)
    star = contraction(make_graph("star", 5))
    assert star.eigenvalue == pytest.approx(4 / 5)
    complete = contraction(make_graph("complete", 5))
    assert (complete.norm, complete.eigenvalue) == (0, 0)
    assert contraction(make_graph("exponential", 8)).eigenvalue == 0


def test_the_product_is_in_the_order_of_steps() -> None:
    graph = make_graph([IRREGULAR, [[0.2, 0, 0], [0.8, 1, 0.5], [0, 0, 0.5]]], 3)
    x = np.array([1.0, -2.0, 4.0])
    assert np.allclose(product(graph) @ x, mix(graph, x), rtol=0, atol=1e-15)


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_irregular_needs_the_weights(overlap: int) -> None:
    """Without de-biasing a graph whose rows do not sum to 1 must not reach the mean; with it, it does."""
    graph = make_graph(IRREGULAR, 3)
    assert problems_of(graph, late="overlap") == []
    x = np.array([1.0, -2.0, 4.0])
    for push_sum, reaches in ((True, True), (False, False)):
        held = next(itertools.islice(mixing(graph, overlap, push_sum), 300, None))
        assert (abs(held @ x - 1).max() < 1e-9) == reaches
    found = contraction(graph)
    assert not found.is_doubly_stochastic
    assert found.eigenvalue == pytest.approx(np.sort(abs(np.linalg.eigvals(product(graph))))[1])
