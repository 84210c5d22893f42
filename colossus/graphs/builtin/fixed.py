"""Graphs that are the same in every step: complete, ring, star, torus."""

from __future__ import annotations

import math

from colossus.graphs.graph_family import GraphFamily, Sends, metropolis, uniform
from colossus.registry import GRAPHS


@GRAPHS.register("complete")
class Complete(GraphFamily):
    """Every replica sends to all others, with weight 1 / n: the mean in one step."""

    takes_peers = False

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        share = 1.0 / replicas
        return [(source, to, share) for source in range(replicas) for to in range(replicas)]


@GRAPHS.register("ring")
class Ring(GraphFamily):
    """Every replica exchanges with the one before and the one after it, with weight 1/3 (1705.09056, section 6).

    Args:
        directed: every replica sends only to the one after it, with weight 1/2.
    """

    takes_peers = False

    def __init__(self, directed: bool = False) -> None:
        self._directed = directed

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        if self._directed:
            return uniform(replicas, [1])
        return metropolis(replicas, ((index, (index + 1) % replicas) for index in range(replicas)))


@GRAPHS.register("star")
class Star(GraphFamily):
    """Replica 0 exchanges with all others, with Metropolis weights: 1 / n on each edge."""

    takes_peers = False

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        return metropolis(replicas, ((0, other) for other in range(1, replicas)))


@GRAPHS.register("torus")
class Torus(GraphFamily):
    """Every replica of a grid of rows and columns exchanges with its four neighbours, with Metropolis weights: 1/5.

    Replicas are numbered row by row. In a direction of two replicas there is one neighbour, not two.

    Args:
        rows: rows of the grid, 2 or more; None: the largest divisor that is at most the square root.
    """

    takes_peers = False

    def __init__(self, rows: int | None = None) -> None:
        self._rows = rows

    def problems(self, replicas: int) -> list[str]:
        rows = self._rows
        if rows is None and self._rows_of(replicas) == 1:
            return [f"{replicas} replicas form no grid of at least 2 x 2; a ring takes any number"]
        if rows is not None and (rows < 2 or replicas % rows or replicas // rows < 2):
            fits = [number for number in range(2, replicas // 2 + 1) if replicas % number == 0]
            return [f"rows = {rows}: {replicas} replicas form no grid of {rows} x 2 or more; rows can be one of {fits}"]
        return []

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        rows = self._rows_of(replicas)
        columns = replicas // rows
        edges = []
        for row in range(rows):
            for column in range(columns):
                here = row * columns + column
                edges.append((here, row * columns + (column + 1) % columns))
                edges.append((here, (row + 1) % rows * columns + column))
        return metropolis(replicas, edges)

    def _rows_of(self, replicas: int) -> int:
        if self._rows is not None:
            return self._rows
        return next(rows for rows in range(math.isqrt(replicas), 0, -1) if replicas % rows == 0)
