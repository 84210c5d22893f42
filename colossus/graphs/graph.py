"""A graph of a run: a family for a number of replicas, with its matrices. No torch."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from colossus.graphs.graph_family import GraphFamily
from colossus.graphs.spec import make_family

#: (the step from which it holds, to how many others a replica sends), by step, the first from step 0
Phases = tuple[tuple[int, int], ...]
#: digits after the point by which graphs are compared: processors may differ in the last bits of a weight
_DIGITS = 9
_NEVER = np.iinfo(np.int64).max


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

    def heard_after(self, source: int, step: int, overlap: int = 0) -> int:
        """The step after which all replicas know what ``source`` says in its messages from ``step`` on.

        Everybody passes it on in all messages after it was heard. What is sent in step t is taken in after step
        t + ``overlap``. Who mixes synchronously cannot be beyond it: it has waited for these messages.

        Raises:
            ValueError: some replica never hears of it.
        """
        #: of each replica the first step whose messages say it
        says = np.full(self.replicas, _NEVER)
        says[source] = step
        quiet, patience = 0, 2 * max(phase.period for phase in self.phases) + overlap
        while (never := says == _NEVER).any():
            hears = never & (self.at(step).matrix[:, says <= step] != 0).any(1)
            says[hears] = step + overlap + 1
            step, quiet = step + 1, 0 if hears.any() else quiet + 1
            if quiet > patience:
                raise ValueError("some replica never hears of another: the graph is not connected")
        return int(says.max()) - 1

    def digest(self) -> bytes:
        """What tells graphs apart."""
        found = hashlib.sha256()
        for phase in self.phases:
            found.update(repr((phase.start, phase.peers, phase.period)).encode())
            for matrix in phase.matrices:
                found.update((np.round(matrix, _DIGITS) + 0.0).tobytes())  # + 0.0: there is no -0
        return found.digest()

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


def parse_peers(value: Any) -> int | Phases:
    """What a config may say: ``2``, or by the step from which it holds ``{0: 1, 200: 2}`` or ``[(0, 1), (200, 2)]``.

    Raises:
        ValueError: for anything else, in words.
    """
    if _is_count(value) and value >= 1:
        return int(value)
    pairs: list[Any] = []
    if isinstance(value, Mapping):  # keys that were written as JSON are strings
        pairs = [(int(key) if isinstance(key, str) and key.isdecimal() else key, count) for key, count in value.items()]
    elif isinstance(value, (list, tuple)) and all(isinstance(item, (list, tuple)) for item in value):
        pairs = [tuple(item) for item in value]
    if not pairs or not all(len(pair) == 2 and all(map(_is_count, pair)) and pair[1] >= 1 for pair in pairs):
        raise ValueError(
            f"must be a number of at least 1, or such numbers by the step they begin at: {{0: 1, 200: 2}}, got "
            f"{value!r}"
        )
    pairs.sort()
    steps = [step for step, _ in pairs]
    if steps[0] != 0 or len(set(steps)) < len(steps):
        raise ValueError(f"{value!r}: the first number is from step 0 on, and each step is named once")
    return tuple((int(step), int(count)) for step, count in pairs)


def phases_of(peers: int | Phases) -> Phases:
    """A number is one phase."""
    return ((0, peers),) if isinstance(peers, int) else peers


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
