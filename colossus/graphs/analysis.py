"""The speed at which mixing over a graph brings replicas to consensus. No torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from colossus.graphs.graph import Graph

#: differences below it are rounding
_ROUNDING = 1e-13


@dataclass(frozen=True)
class Contraction:
    """The contraction of differences between replicas over one period.

    Attributes:
        norm: the 2-norm of the product of the period's matrices minus the mean: a bound on the factor by which the
            distance to the mean shrinks, for any parameters. With push-sum the product is de-biased: row i is divided
            by the weight of replica i. It can be above 1 where weights become unequal.
        eigenvalue: the second-largest modulus of the eigenvalues of the product: the factor after many periods.
        is_doubly_stochastic: all weights stay 1.
    """

    period: int
    norm: float
    eigenvalue: float
    is_doubly_stochastic: bool


@dataclass(frozen=True)
class Consensus:
    """The time until replicas agree, when they only mix.

    Attributes:
        steps: the steps after which their distance to the mean is below ``tolerance`` times the initial one; None: they
            do not agree within the steps that were tried.
        is_exact: the remaining distance is rounding.
    """

    steps: int | None
    tolerance: float
    is_exact: bool = False


def product(graph: Graph) -> np.ndarray:
    """Return the product of the matrices of a period, the last step's leftmost: x becomes ``product @ x``."""
    total = np.eye(len(graph.matrices[0]))
    for matrix in graph.matrices:
        total = matrix @ total
    return total


def debiased(matrix: np.ndarray) -> np.ndarray:
    """Return a product of column-stochastic matrices as push-sum uses it: each row over the weight of its replica."""
    return np.asarray(matrix / matrix.sum(1, keepdims=True))


def distance(matrix: np.ndarray) -> float:
    """Return the 2-norm of ``matrix`` minus the matrix of the exact mean."""
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


def contraction(graph: Graph) -> Contraction:
    """Return the contraction of a period."""
    total = product(graph)
    moduli = np.sort(abs(np.linalg.eigvals(total)))
    eigenvalue = float(moduli[-2]) if len(moduli) > 1 else 0.0
    norm, rounding = distance(debiased(total)), _ROUNDING * len(total)
    # if the product is nilpotent beside the mean, its computed eigenvalues are roots of the rounding error
    eigenvalue = 0.0 if norm <= rounding else eigenvalue
    is_doubly = all(abs(matrix.sum(1) - 1).max() <= 1e-12 for matrix in graph.matrices)
    return Contraction(graph.period, 0.0 if norm <= rounding else norm, eigenvalue, is_doubly)


def mixing(graph: Graph, overlap: int = 0, push_sum: bool = True) -> Iterator[np.ndarray]:
    """Yield the state after steps 0, 1, .. as combinations of the initial values: [replicas, replicas].

    Args:
        overlap: steps for which messages travel; a travelling message belongs to no replica.
        push_sum: divide by the push-sum weights.
    """
    state, step = np.eye(graph.replicas), 0
    travelling: deque[np.ndarray] = deque()
    while True:
        matrix = graph.at(step).matrix
        own_weights = np.diag(matrix)[:, None]
        travelling.append((matrix - np.diag(np.diag(matrix))) @ state)
        state = own_weights * state
        if len(travelling) > overlap:
            state = state + travelling.popleft()
        yield debiased(state) if push_sum else state
        step += 1


def consensus(graph: Graph, overlap: int = 0, tolerance: float = 1e-6, patience: int = 2000) -> Consensus:
    """Return the time until replicas agree.

    Args:
        tolerance: the largest ratio of the distance to the mean over the initial one at which replicas agree, for any
            values.
        patience: steps to try.
    """
    size = graph.replicas
    for steps, state in enumerate(mixing(graph, overlap), 1):
        rest = state - 1 / size
        # Frobenius norm / sqrt(size) <= 2-norm, so the cheap norm comes first
        if np.linalg.norm(rest) <= math.sqrt(size) * tolerance and distance(state) <= tolerance:
            return Consensus(steps, tolerance, is_exact=distance(state) <= _ROUNDING * size)
        if steps >= patience:
            break
    return Consensus(None, tolerance)
