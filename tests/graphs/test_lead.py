"""How far replicas can be apart, against a simulation of replicas that wait for nothing but their messages."""

from __future__ import annotations

import random
from typing import Any

import pytest

from colossus.graphs.graph import Graph, make_graph


class Replicas:
    """Replicas that are stepped one at a time: each sends what belongs to its step, and completes it if it can."""

    def __init__(self, graph: Graph, overlap: int) -> None:
        self.graph, self.overlap = graph, overlap
        self.completed = [0] * graph.replicas
        self.sent = [0] * graph.replicas  # messages of steps below it
        self.knows = [False] * graph.replicas
        self.told: list[list[bool]] = [[] for _ in range(graph.replicas)]  # by message: whether the news is in it
        self.learnt: list[int | None] = [None] * graph.replicas  # the step on whose completion

    def advance(self, index: int) -> bool:
        """Whether something happened."""
        step = self.completed[index]
        news = self.sent[index] == step
        if news:
            self.sent[index] += 1
            self.told[index].append(self.knows[index])
        due = step - self.overlap
        sources = self.graph.at(due).sources(index) if due >= 0 else []
        if any(self.sent[source] <= due for source in sources):
            return news
        if not self.knows[index] and any(self.told[source][due] for source in sources):
            self.knows[index], self.learnt[index] = True, step
        self.completed[index] += 1
        return True

    @property
    def lead(self) -> int:
        return max(self.completed) - min(self.completed)


def worst_lead(graph: Graph, overlap: int, starts: range) -> int:
    """Each replica in turn stops before each step, and the others go on until they cannot."""
    worst = 0
    for stopped in range(graph.replicas):
        for start in starts:
            replicas = Replicas(graph, overlap)
            while min(replicas.completed) < start:
                for index in range(graph.replicas):
                    if replicas.completed[index] < start:
                        replicas.advance(index)
            replicas.sent[stopped] += 1  # and no further, even if it could complete the step
            replicas.told[stopped].append(False)
            others = [index for index in range(graph.replicas) if index != stopped]
            while sum(map(replicas.advance, others)):
                pass
            worst = max(worst, replicas.lead)
    return worst


CASES: list[tuple[Any, int, Any]] = [
    ("complete", 4, 1),
    ("ring", 6, 1),
    ({"type": "ring", "directed": True}, 5, 1),
    ("star", 5, 1),
    ("linear", 5, 1),
    ("exponential", 6, 1),
    ("exponential", 8, 1),
    ("exponential", 7, 2),
    ("bipartite_exponential", 8, 1),
    ({"type": "hierarchical", "per_host": 2, "between": "ring"}, 6, 1),
    ([[[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], [[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]]], 3, 1),
    ("exponential", 8, ((0, 1), (9, 7))),
    ("exponential", 8, ((0, 7), (9, 1))),
    ("exponential", 8, ((0, 1), (4, 1))),  # which begins anew in the midst: hops 1, 1, 2, 4
]


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize(("spec", "replicas", "peers"), CASES, ids=str)
def test_the_largest_lead_is_reached_and_never_passed(spec: Any, replicas: int, peers: Any, overlap: int) -> None:
    graph = make_graph(spec, replicas, peers)
    lead = graph.largest_lead(overlap)
    # with a schedule: stops before and after the change
    assert worst_lead(graph, overlap, range(14 if len(graph.phases) > 1 else graph.phases[0].period)) == lead
    drawn = random.Random(7)
    for _ in range(3):
        now, wisher, wished_at = Replicas(graph, overlap), drawn.randrange(replicas), drawn.randrange(12)
        speeds = [drawn.choice([1, 1, 10, 100]) for _ in range(replicas)]
        while min(now.completed) < wished_at + lead + 3:
            index = drawn.choices(range(replicas), speeds)[0]
            if now.completed[wisher] == wished_at + 1:
                now.knows[wisher] = True
            now.advance(index)
            assert now.lead <= lead
        # what it says after step `wished_at`, all know when they complete that step and the lead
        learnt = [step for step in now.learnt if step is not None]
        assert len(learnt) == replicas - 1
        assert max(learnt) <= wished_at + lead


def test_one_that_hears_nothing() -> None:
    graph = make_graph([[1, 0], [0, 1]], 2)
    with pytest.raises(ValueError, match="never hears of another"):
        graph.largest_lead()
