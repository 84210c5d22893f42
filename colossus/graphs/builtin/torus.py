"""The torus: a grid whose ends are joined."""

from __future__ import annotations

import math

from colossus.graphs.family import GraphFamily, Sends
from colossus.graphs.weights import metropolis, undirected
from colossus.registry import GRAPHS


@GRAPHS.register("torus")
class Torus(GraphFamily):
    """Every replica of a grid of rows and columns exchanges with the four next to it, with Metropolis weights: 1/5.

    Replicas are numbered row by row. In a direction of two there is one neighbour, not two.

    Args:
        rows: of the grid, 2 or more; None: the divisor nearest to the root from below.
    """

    takes_peers = False

    def __init__(self, rows: int | None = None) -> None:
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 2):
            raise ValueError(f"rows = {rows!r}: a whole number of at least 2")
        self._rows = rows

    def problems(self, replicas: int) -> list[str]:
        rows = self._rows
        if rows is None and self._rows_of(replicas) == 1:
            return [f"{replicas} replicas are no rows x columns of at least 2 x 2; a ring takes any number"]
        if rows is not None and (replicas % rows or replicas // rows < 2):
            fits = [number for number in range(2, replicas // 2 + 1) if replicas % number == 0]
            hint = f"rows can be {', '.join(map(str, fits))}" if fits else "a ring takes any number"
            return [f"rows = {rows}: {replicas} replicas are not {rows} x 2 or more; {hint}"]
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
        return metropolis(undirected(replicas, edges))

    def _rows_of(self, replicas: int) -> int:
        if self._rows is not None:
            return self._rows
        return next(rows for rows in range(math.isqrt(replicas), 0, -1) if replicas % rows == 0)
