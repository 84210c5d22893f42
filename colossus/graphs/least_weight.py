"""How small push-sum weights become: what an update adds to z = x / w is the learning rate over w. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from colossus.graphs.graph import Graph

#: steps looked at, at least, and a weight below which it does not matter how small it is
_FEWEST, _NOTHING = 50, 1e-6


@dataclass(frozen=True)
class LeastWeight:
    """The smallest push-sum weight.

    Attributes:
        completed: the steps after which it is so first.
        replica: the first that has it.
    """

    weight: float
    completed: int
    replica: int

    @property
    def in_words(self) -> str:
        times = 1 / self.weight if self.weight else float("inf")
        return (
            f"push-sum weights fall to {self.weight:.2g} (replica {self.replica} after step {self.completed}), and an "
            f"update of z = x / w is then {times:.3g} times as large"
        )


def least_weight(graph: Graph, overlap: int) -> LeastWeight:
    """Of the first steps, in which nothing has come yet of what travels."""
    weights, travelling = np.ones(graph.replicas), deque[np.ndarray]()
    found = LeastWeight(1.0, 0, 0)
    for step in range(max(_FEWEST, 2 * graph.phases[0].period + overlap)):
        matrix = graph.at(step).matrix
        kept = np.diag(matrix) * weights
        travelling.append(matrix @ weights - kept)
        weights = kept + (travelling.popleft() if len(travelling) > overlap else 0.0)
        replica = int(weights.argmin())
        if weights[replica] < found.weight - 1e-12:
            found = LeastWeight(float(weights[replica]), step + 1, replica)
        if found.weight < _NOTHING:
            break
    return found
