"""A graph of a run: a family for a number of replicas, with its matrices. No torch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from colossus.graphs.family import GraphFamily
from colossus.graphs.lead import largest_lead
from colossus.graphs.peers import Phases, phases_of
from colossus.graphs.spec import make_family


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


@dataclass(frozen=True)
class Phase:
    """Steps with the same number of peers.

    Attributes:
        start: its first step.
        steps: the graphs of its period, which begins with ``start``.
    """

    start: int
    peers: int
    steps: list[StepGraph]

    @property
    def period(self) -> int:
        return len(self.steps)

    def matrix_at(self, step: int) -> np.ndarray:
        """Of a step from the beginning of the phase."""
        return self.steps[step % self.period].matrix

    @property
    def matrices(self) -> list[np.ndarray]:
        return [step.matrix for step in self.steps]


class Graph:
    """The graphs of all steps of a run. One replica alone keeps what it has.

    Args:
        family: of `GRAPHS`.
        replicas: how many there are.
        peers: to how many others a replica sends in a step; or that by the step from which it holds.

    Raises:
        ValueError: for one that there is not for so many replicas, in words.
    """

    def __init__(self, family: GraphFamily, replicas: int, peers: int | Phases = 1) -> None:
        self.family, self.replicas, self.peers = family, replicas, peers
        if replicas > 1 and (problems := family.problems(replicas)):
            raise ValueError("; ".join(problems))
        self.phases = [self._phase(start, number) for start, number in phases_of(peers)]
        self._starts = [phase.start for phase in self.phases]

    def at(self, step: int) -> StepGraph:
        """Of a step, from 0."""
        phase = self.phase(step)
        return phase.steps[(step - phase.start) % phase.period]

    def phase(self, step: int) -> Phase:
        """That of a step."""
        return self.phases[bisect_right(self._starts, step) - 1]

    def largest_lead(self, overlap: int = 0) -> int:
        """By how many completed steps one replica can be ahead of another; what one says after step t in all its
        messages from then on, all know when they complete step t + lead. See `lead.largest_lead`."""
        if self.replicas == 1:
            return 0
        longest = max(phase.period for phase in self.phases)
        largest = 0
        for number, phase in enumerate(self.phases):
            alone = largest_lead(phase.matrix_at, self.replicas, range(phase.period), overlap, phase.period)
            largest = max(largest, alone)
            if number + 1 < len(self.phases):  # what begins in this phase and ends in the next
                end = self.phases[number + 1].start
                crossing = range(max(phase.start, end - alone - overlap - 1), end)
                across = largest_lead(lambda step: self.at(step).matrix, self.replicas, crossing, overlap, longest)
                largest = max(largest, across)
        return largest

    def _phase(self, start: int, peers: int) -> Phase:
        if self.replicas == 1:
            return Phase(start, peers, [StepGraph(np.ones((1, 1)))])
        if self.family.takes_peers and peers > (most := self.family.most_peers(self.replicas)):
            raise ValueError(f"peers = {peers}: with {self.replicas} replicas there are at most {most} in a step")
        return Phase(
            start, peers, [self._make(step, peers) for step in range(self.family.period(self.replicas, peers))]
        )

    def _make(self, step: int, peers: int) -> StepGraph:
        matrix = np.zeros((self.replicas, self.replicas))
        for source, to, weight in self.family.sends(self.replicas, step, peers):
            matrix[to, source] += weight
        matrix.flags.writeable = False
        return StepGraph(matrix)


def make_graph(spec: Any, replicas: int, peers: int | Phases = 1) -> Graph:
    """The graph that a config names; see `make_family`.

    Raises:
        ValueError: for one that there is not, in words.
    """
    return Graph(make_family(spec), replicas, peers)
