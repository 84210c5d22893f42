"""A graph of a run: a family of graphs for a number of replicas, with its matrices. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from colossus.graphs.graph_family import GraphFamily
from colossus.graphs.spec import make_family

#: decimal digits that are compared between graphs: processors may differ in the last bits of a weight
_DIGITS = 9


@dataclass(frozen=True)
class StepGraph:
    """The graph of one step.

    Attributes:
        matrix: [replicas, replicas]; column j has the weights that j sends to each, so that x becomes ``matrix @ x``.
    """

    matrix: np.ndarray

    def keeps(self, index: int) -> float:
        """Return the weight with which a replica keeps its own value."""
        return float(self.matrix[index, index])

    def targets(self, index: int) -> list[tuple[int, float]]:
        """Return (to, weight) of the messages that a replica sends to others."""
        column = self.matrix[:, index]
        return [(int(to), float(column[to])) for to in np.flatnonzero(column) if to != index]

    def sources(self, index: int) -> list[int]:
        """Return the replicas that send to this one, in order."""
        return [int(source) for source in np.flatnonzero(self.matrix[index]) if source != index]


class Graph:
    """The graphs of all steps of a run, which repeat after ``period``. A single replica keeps its value.

    Args:
        family: a family of `GRAPHS`.
        replicas: the number of replicas.
        peers: the number of others to which a replica sends in a step.

    Attributes:
        steps: the graphs of a period.

    Raises:
        ValueError: there is no such graph for so many replicas; the message says why.
    """

    def __init__(self, family: GraphFamily, replicas: int, peers: int = 1) -> None:
        self.family, self.replicas, self.peers = family, replicas, peers
        if replicas == 1:
            self.steps = [StepGraph(np.ones((1, 1)))]
            return
        if problems := family.problems(replicas):
            raise ValueError("; ".join(problems))
        if not family.takes_peers and peers != 1:
            raise ValueError(f"peers = {peers}: this graph determines to whom replicas send; leave peers out")
        if family.takes_peers and not 1 <= peers <= (most := family.most_peers(replicas)):
            raise ValueError(f"peers = {peers}: with {replicas} replicas it must be 1 to {most}")
        self.steps = [self._make(step) for step in range(family.period(replicas, peers))]

    @property
    def period(self) -> int:
        return len(self.steps)

    @property
    def matrices(self) -> list[np.ndarray]:
        """The matrices of a period."""
        return [step.matrix for step in self.steps]

    def at(self, step: int) -> StepGraph:
        """Return the graph of a step, from 0."""
        return self.steps[step % self.period]

    def digest(self) -> bytes:
        """Return a hash of the graph, by which processes compare theirs."""
        digest = hashlib.sha256(repr(self.period).encode())
        for matrix in self.matrices:
            digest.update((np.round(matrix, _DIGITS) + 0.0).tobytes())  # + 0.0: there is no -0
        return digest.digest()

    def _make(self, step: int) -> StepGraph:
        matrix = np.zeros((self.replicas, self.replicas))
        for source, to, weight in self.family.sends(self.replicas, step, self.peers):
            matrix[to, source] += weight
        matrix.flags.writeable = False
        return StepGraph(matrix)


def make_graph(spec: Any, replicas: int, peers: int = 1) -> Graph:
    """Return the graph that a config names; see `make_family`.

    Raises:
        ValueError: there is no such graph; the message says why.
    """
    return Graph(make_family(spec), replicas, peers)
