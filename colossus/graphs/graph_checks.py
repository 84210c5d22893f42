"""Checks of a graph before replicas mix over it, with messages that show the numbers. No torch."""

from __future__ import annotations

import numpy as np

from colossus.graphs.graph import Graph

#: the largest error of a column's sum; weights are float64
_TOLERANCE = 1e-12


def problems_of(graph: Graph, *, doubly_stochastic: bool = False, bipartite: bool = False, late: str = "") -> list[str]:
    """Return the problems of a graph; an empty list if it is right.

    Always checked: no weight is negative, columns sum to 1 (the mass is conserved), every replica receives a value, and
    every replica reaches every other within a period.

    Args:
        doubly_stochastic: rows must sum to 1, too, so that the mean stays without push-sum weights.
        bipartite: replicas must be of two sides, and exchange only with the other side.
        late: why messages may arrive later than they are sent, in words: then every replica must keep a part.
    """
    if graph.replicas == 1:
        return []
    for step, matrix in enumerate(graph.matrices):
        if problem := _problem_of(matrix, doubly_stochastic, late):
            return [(f"matrix of step {step}: " if graph.period > 1 else "") + problem]
    edges = np.any(np.stack(graph.matrices) != 0, axis=0)
    for first, reached in ((0, reach(edges, 0)), (1, reach(edges.T, 0))):
        if lost := set(range(len(edges))) - reached:
            whom = (f"replica 0 never reaches replica {min(lost)}", f"replica {min(lost)} never reaches replica 0")[
                first
            ]
            return [f"it is not connected: {whom}"]
    if bipartite and two_sides(edges) is None:
        return ["it is not bipartite: there is a cycle of odd length"]
    return []


def _problem_of(matrix: np.ndarray, doubly_stochastic: bool, late: str) -> str | None:
    """Return the first problem of a matrix. Row i is received by i, column j is sent by j."""
    odd = np.argwhere(~np.isfinite(matrix) | (matrix < 0))
    if len(odd):
        to, source = odd[0]
        return f"row {to}, column {source}: the weight is {matrix[to, source]:g}"
    columns, rows = matrix.sum(0), matrix.sum(1)
    bad = np.flatnonzero(abs(columns - 1) > _TOLERANCE)
    if len(bad):
        all_rows = (abs(rows - 1) <= _TOLERANCE).all()
        hint = "; all rows do: is it transposed? A column has the weights that one replica sends" if all_rows else ""
        return f"column {bad[0]} sums to {columns[bad[0]]:.15g}, not 1{hint}"
    empty = np.flatnonzero(rows == 0)
    if len(empty):
        return f"row {empty[0]} sums to 0: replica {empty[0]} keeps nothing and receives nothing"
    bad = np.flatnonzero(abs(rows - 1) > _TOLERANCE)
    if doubly_stochastic and len(bad):
        return (
            f"row {bad[0]} sums to {rows[bad[0]]:.15g}, not 1; without push-sum weights the mean stays only where rows "
            f"sum to 1, too (sgp takes this graph)"
        )
    idle = np.flatnonzero(np.diag(matrix) == 0)
    if late and len(idle):
        return f"replica {idle[0]} keeps nothing, so with {late} it has no parameters while its messages travel"
    return None


def reach(edges: np.ndarray, start: int) -> set[int]:
    """Return the replicas that one reaches; ``edges`` is [to, source]."""
    reached, todo = {start}, [start]
    while todo:
        new = set(np.flatnonzero(edges[:, todo.pop()]).tolist()) - reached
        reached |= new
        todo += new
    return reached


def two_sides(edges: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Return the two sides of a connected bipartite graph, that of replica 0 first; None if it is not bipartite."""
    both = edges | edges.T
    np.fill_diagonal(both, False)
    side, order = {0: 0}, [0]
    for here in order:
        for other in map(int, np.flatnonzero(both[here])):
            if other not in side:
                side[other] = 1 - side[here]
                order.append(other)
            elif side[other] == side[here]:
                return None
    return sorted(i for i in side if not side[i]), sorted(i for i in side if side[i])
