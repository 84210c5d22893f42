"""How fast a graph brings replicas together, when they only mix. No torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from colossus.graphs.graph import Graph

#: below it a difference is rounding
_ROUNDING = 1e-13


@dataclass(frozen=True)
class Contraction:
    """What one period does to differences between replicas.

    Attributes:
        norm: the 2-norm of the product of the period's matrices minus the mean: by how much the distance to the mean
            shrinks at least, whatever the parameters are. With push-sum the product is de-biased: row i is divided by
            the weight of replica i. It can be above 1 where weights become unequal.
        eigenvalue: the second-largest modulus of the eigenvalues of the product: by how much it shrinks in the end.
        is_doubly_stochastic: whether all weights stay 1.
    """

    period: int
    norm: float
    eigenvalue: float
    is_doubly_stochastic: bool


@dataclass(frozen=True)
class Consensus:
    """When replicas are at one, mixing alone.

    Attributes:
        steps: after which their distance to the mean is below ``tolerance`` of that at the start; None: not in sight.
        is_exact: the rest is rounding.
    """

    steps: int | None
    tolerance: float
    is_exact: bool = False


def product(graph: Graph) -> np.ndarray:
    """The matrices of a period, the last step's leftmost: x after it is ``product @ x``."""
    total = np.eye(len(graph.matrices[0]))
    for matrix in graph.matrices:
        total = matrix @ total
    return total


def debiased(matrix: np.ndarray) -> np.ndarray:
    """What push-sum makes of a product of column-stochastic matrices: each row over the weight of its replica."""
    return np.asarray(matrix / matrix.sum(1, keepdims=True))


def distance(matrix: np.ndarray) -> float:
    """The 2-norm of ``matrix`` minus the one that gives everybody the mean."""
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


def contraction(graph: Graph) -> Contraction:
    """Of a period."""
    total = product(graph)
    moduli = np.sort(abs(np.linalg.eigvals(total)))
    eigenvalue = float(moduli[-2]) if len(moduli) > 1 else 0.0
    norm, rounding = distance(debiased(total)), _ROUNDING * len(total)
    # a product of matrices that is nilpotent beside the mean has eigenvalues of the root of the rounding
    eigenvalue = 0.0 if norm <= rounding else eigenvalue
    is_doubly = all(abs(matrix.sum(1) - 1).max() <= 1e-12 for matrix in graph.matrices)
    return Contraction(graph.period, 0.0 if norm <= rounding else norm, eigenvalue, is_doubly)


def mixing(graph: Graph, overlap: int = 0, push_sum: bool = True) -> Iterator[np.ndarray]:
    """What each replica has after steps 0, 1, .. as a combination of what they had at first: [replicas, replicas].

    Args:
        overlap: steps for which messages travel; what travels is with nobody.
        push_sum: whether the weights are divided out.
    """
    held, step = np.eye(graph.replicas), 0
    travelling: deque[np.ndarray] = deque()
    while True:
        matrix = graph.at(step).matrix
        kept = np.diag(matrix)[:, None]
        travelling.append((matrix - np.diag(np.diag(matrix))) @ held)
        held = kept * held
        if len(travelling) > overlap:
            held = held + travelling.popleft()
        yield debiased(held) if push_sum else held
        step += 1


def consensus(graph: Graph, overlap: int = 0, tolerance: float = 1e-6, patience: int = 2000) -> Consensus:
    """When replicas are at one.

    Args:
        tolerance: the largest distance to the mean that counts as that, over that at the start, whatever they hold.
        patience: steps to try.
    """
    size = graph.replicas
    for steps, held in enumerate(mixing(graph, overlap), 1):
        rest = held - 1 / size
        # the 2-norm is between the Frobenius norm over the root of the size, and it
        if np.linalg.norm(rest) <= math.sqrt(size) * tolerance and distance(held) <= tolerance:
            return Consensus(steps, tolerance, is_exact=distance(held) <= _ROUNDING * size)
        if steps >= patience:
            break
    return Consensus(None, tolerance)
