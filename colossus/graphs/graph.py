"""A graph of a run: a family for a number of replicas, with its matrices. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from colossus.graphs.family import GraphFamily
from colossus.registry import GRAPHS


@dataclass(frozen=True)
class StepGraph:
    """The graph of one step.

    Attributes:
        matrix: [replicas, replicas]; column j is what j gives to each, so that x becomes ``matrix @ x``.
    """

    matrix: np.ndarray

    def keeps(self, index: int) -> float:
        """The weight with which a replica keeps its own."""
        return float(self.matrix[index, index])

    def targets(self, index: int) -> list[tuple[int, float]]:
        """(to, weight) of what a replica sends to others."""
        column = self.matrix[:, index]
        return [(int(to), float(column[to])) for to in np.flatnonzero(column) if to != index]

    def sources(self, index: int) -> list[int]:
        """From whom a replica gets something, in order."""
        return [int(source) for source in np.flatnonzero(self.matrix[index]) if source != index]


class Graph:
    """The graphs of all steps of a run.

    Args:
        family: of `GRAPHS`.
        replicas: how many there are.
        peers: to how many others a replica sends in a step.
    """

    def __init__(self, family: GraphFamily, replicas: int, peers: int = 1) -> None:
        self._family, self.replicas, self._peers = family, replicas, peers

    @cached_property
    def period(self) -> int:
        """Steps after which it repeats."""
        return self._family.period(self.replicas, self._peers)

    def at(self, step: int) -> StepGraph:
        """Of a step, from 0."""
        return self._steps[step % self.period]

    @cached_property
    def _steps(self) -> list[StepGraph]:
        return [self._make(step) for step in range(self.period)]

    def _make(self, step: int) -> StepGraph:
        matrix = np.zeros((self.replicas, self.replicas))
        if self.replicas == 1:
            return StepGraph(np.ones((1, 1)))
        for source, to, weight in self._family.sends(self.replicas, step, self._peers):
            matrix[to, source] += weight
        return StepGraph(matrix)


def make_graph(spec: str | Mapping[str, Any], replicas: int, peers: int = 1) -> Graph:
    """The graph that a config names."""
    family = GRAPHS.build({"type": spec} if isinstance(spec, str) else spec)
    return Graph(family, replicas, peers)
