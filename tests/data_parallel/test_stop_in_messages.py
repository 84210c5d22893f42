"""A request to stop that travels by a graph, without ranks: what is known where after which step does not depend on
who is how fast."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.gossip import Matrices, irregular

from colossus.data_parallel.gossip.stop_in_messages import StopInMessages
from colossus.graphs.graph import Graph, make_graph

GRAPHS: list[tuple[Any, int, Any, int]] = [
    ("exponential", 5, 1, 0),
    ("exponential", 6, ((0, 1), (3, 2), (11, 1)), 1),
    ("ring", 5, 1, 2),
    (dict(type="ring", directed=True), 4, 1, 1),
    ("star", 4, 1, 0),
    ("bipartite_exponential", 6, 1, 3),
    (dict(type=Matrices, matrices=irregular(4)), 4, 1, 1),
]


def _stops(graph: Graph, overlap: int, lead: int, requests: dict[int, int]) -> list[int]:
    """The steps after which the replicas stop first, -1 for never.

    Args:
        requests: replica -> the step in which it requests a stop.
    """
    waves = [StopInMessages(lead) for _ in range(graph.replicas)]
    sent: list[list[bytes]] = []
    stops: dict[int, int] = {}
    for step in range(max(requests.values()) + lead + 2):
        sent.append([wave.pack() for wave in waves])
        for index, wave in enumerate(waves):
            if step >= overlap:
                for source in graph.at(step - overlap).sources(index):
                    wave.hear(sent[step - overlap][source], step)
            wave.request(step, float(requests.get(index) == step))
            if wave.due(step):
                stops.setdefault(index, step)
    return [stops.get(index, -1) for index in range(graph.replicas)]


@pytest.mark.parametrize(("spec", "replicas", "peers", "overlap"), GRAPHS)
def test_all_stop_at_the_step_of_the_wish_and_the_lead(spec: Any, replicas: int, peers: Any, overlap: int) -> None:
    """For every replica and step of the period, and with another request meanwhile; by one step less not all have
    heard."""
    graph = make_graph(spec, replicas, peers)
    lead, too_early = graph.largest_lead(overlap), False
    for step in range(12):
        for index in range(replicas):
            assert _stops(graph, overlap, lead, {index: step}) == [step + lead] * replicas
            other = {index: step, (index + 2) % replicas: step + 1 + (step + index) % lead}
            assert _stops(graph, overlap, lead, other) == [step + lead] * replicas
            too_early |= len(set(_stops(graph, overlap, lead - 1, {index: step}))) > 1
    assert too_early
