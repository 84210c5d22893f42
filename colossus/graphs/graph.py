"""A graph of a run: a family for a number of replicas, with its matrices. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from colossus.graphs.graph_family import GraphFamily
from colossus.graphs.spec import make_family

#: digits after the point by which graphs are compared: processors may differ in the last bits of a weight
_DIGITS = 9


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
    """The graphs of all steps of a run, which repeat after ``period``. One replica alone keeps what it has.

    Args:
        family: of `GRAPHS`.
        replicas: how many there are.
        peers: to how many others a replica sends in a step.

    Attributes:
        steps: of a period.

    Raises:
        ValueError: for one that there is not for so many replicas, in words.
    """

    def __init__(self, family: GraphFamily, replicas: int, peers: int = 1) -> None:
        self.family, self.replicas, self.peers = family, replicas, peers
        if replicas == 1:
            self.steps = [StepGraph(np.ones((1, 1)))]
            return
        if problems := family.problems(replicas):
            raise ValueError("; ".join(problems))
        if not family.takes_peers and peers != 1:
            raise ValueError(f"peers = {peers}: this graph itself says to whom replicas send; leave peers out")
        if family.takes_peers and not 1 <= peers <= (most := family.most_peers(replicas)):
            raise ValueError(f"peers = {peers}: with {replicas} replicas there are 1 to {most} in a step")
        self.steps = [self._make(step) for step in range(family.period(replicas, peers))]

    @property
    def period(self) -> int:
        return len(self.steps)

    @property
    def matrices(self) -> list[np.ndarray]:
        """Of a period."""
        return [step.matrix for step in self.steps]

    def at(self, step: int) -> StepGraph:
        """Of a step, from 0."""
        return self.steps[step % self.period]

    def digest(self) -> bytes:
        """What tells graphs apart."""
        found = hashlib.sha256(repr(self.period).encode())
        for matrix in self.matrices:
            found.update((np.round(matrix, _DIGITS) + 0.0).tobytes())  # + 0.0: there is no -0
        return found.digest()

    def _make(self, step: int) -> StepGraph:
        matrix = np.zeros((self.replicas, self.replicas))
        for source, to, weight in self.family.sends(self.replicas, step, self.peers):
            matrix[to, source] += weight
        matrix.flags.writeable = False
        return StepGraph(matrix)


def make_graph(spec: Any, replicas: int, peers: int = 1) -> Graph:
    """The graph that a config names; see `make_family`.

    Raises:
        ValueError: for one that there is not, in words.
    """
    return Graph(make_family(spec), replicas, peers)
