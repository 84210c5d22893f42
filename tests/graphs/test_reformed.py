"""Graphs over the replicas that are left."""

from __future__ import annotations

import numpy as np
import pytest

from colossus.engine.strategies.options.gossip import DPSGDOptions, SGPOptions
from colossus.graphs.graph import make_graph
from colossus.graphs.reformed import LivingGraph, reform

LIVING = (0, 2, 3)


def test_the_dead_neither_send_nor_get() -> None:
    graph = LivingGraph(make_graph("exponential", 3), LIVING, 4)
    for step in range(4):
        matrix = graph.at(step).matrix
        assert not matrix[1].any()
        assert not matrix[:, 1].any()
        np.testing.assert_array_equal(matrix[np.ix_(LIVING, LIVING)], make_graph("exponential", 3).at(step).matrix)
        assert graph.at(step) is graph.at(step)
    assert graph.at(0).targets(0) == [(2, 0.5)]
    assert graph.at(0).sources(0) == [3]


@pytest.mark.parametrize("spec", ["exponential", "ring", "complete", "linear", "star"])
def test_the_same_family_where_it_fits(spec: str) -> None:
    graph, why = reform(make_graph(spec, 4), 3, SGPOptions(graph=spec).problems_of)
    assert not why
    np.testing.assert_array_equal(graph.at(1).matrix, make_graph(spec, 3).at(1).matrix)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("bipartite_exponential", "must be even, got 3"),
        (np.full((4, 4), 0.25), "its matrices are 4 x 4, but there are 3 replicas"),
        (dict(type="hierarchical", per_host=2), "per_host = 2"),
    ],
)
def test_another_one_where_there_is_none(spec: object, reason: str) -> None:
    options = DPSGDOptions(graph=spec)
    graph, why = reform(make_graph(spec, 4), 3, options.problems_of, "what the user calls it")
    assert why.startswith("what the user calls it does not fit 3: ")
    assert reason in why
    assert "exponential does" in why
    assert not options.problems_of(graph)


def test_peers_that_are_too_many_become_what_fits() -> None:
    graph, why = reform(make_graph("exponential", 4, 3), 3, SGPOptions(peers=3).problems_of)
    assert not why
    assert len(graph.at(0).targets(0)) == 2


def test_the_last_one_keeps_all() -> None:
    graph, why = reform(make_graph("bipartite_exponential", 4), 1, DPSGDOptions().problems_of)
    assert not why
    assert LivingGraph(graph, (2,), 4).at(7).matrix[2, 2] == 1.0
