"""The graph over the replicas that are left, in the numbers of all. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from colossus.graphs.graph import Graph, StepGraph, make_graph

#: there is one for any number of replicas, and it is doubly stochastic
_FALLBACK = "exponential"


class LivingGraph:
    """A graph over some of the replicas; the others neither send nor get anything.

    Args:
        graph: of as many replicas as live.
        living: their indices among all, in order.
        replicas: all that there were.
    """

    def __init__(self, graph: Graph, living: Sequence[int], replicas: int) -> None:
        self.graph, self.living, self._replicas = graph, tuple(living), replicas
        self._made: dict[int, StepGraph] = {}

    def at(self, step: int) -> StepGraph:
        """Of a step, from 0; [all replicas, all replicas]."""
        inner = self.graph.at(step)
        if len(self.living) == self._replicas:
            return inner
        made = self._made.get(id(inner))
        if made is None:
            matrix = np.zeros((self._replicas, self._replicas))
            matrix[np.ix_(self.living, self.living)] = inner.matrix
            made = self._made[id(inner)] = StepGraph(matrix)
        return made


def reform(
    graph: Graph, replicas: int, problems: Callable[[Graph], list[str]], name: str = "the graph"
) -> tuple[Graph, str]:
    """The same family for fewer replicas, or, where there is none that fits, one that fits any number.

    Args:
        problems: what is wrong with a graph for who mixes by it.
        name: of the graph, as the user calls it.

    Returns:
        The graph, and why it is of another family; nothing where it is of the same.
    """
    try:
        found = graph.for_replicas(replicas)
        wrong = problems(found)
    except ValueError as error:
        wrong = [str(error)]
    if not wrong:
        return found, ""
    other = make_graph(_FALLBACK, replicas)
    return other, f"{name} does not fit {replicas}: {wrong[0]}; {_FALLBACK} does"
