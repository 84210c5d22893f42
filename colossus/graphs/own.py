"""Graphs of the user's own: a function, or matrices. No torch."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from colossus.graphs.graph_family import GraphFamily, Sends


def is_matrices(value: Any) -> bool:
    """Whether a value is meant for a matrix or a list of matrices: an array, or lists of lists."""
    if isinstance(value, np.ndarray):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_row_or_matrix, value))


def _is_row_or_matrix(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


class OwnMatrices(GraphFamily):
    """One matrix, or one for each step in turn. Column j is what j gives to each: x becomes ``matrix @ x``."""

    takes_peers = False

    def __init__(self, matrices: Any) -> None:
        try:
            stacked = _real(matrices)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a matrix is n rows of n numbers; these are not: {error}") from None
        self._matrices = stacked[None] if stacked.ndim == 2 else stacked
        if self._matrices.ndim != 3 or self._matrices.shape[1] != self._matrices.shape[2] or not stacked.size:
            raise ValueError(
                f"a matrix is n rows of n numbers, or there is a list of such; these are of shape {stacked.shape}"
            )

    def problems(self, replicas: int) -> list[str]:
        size = self._matrices.shape[1]
        return [] if size == replicas else [f"its matrices are {size} x {size}, but there are {replicas} replicas"]

    def period(self, replicas: int, peers: int) -> int:
        return len(self._matrices)

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        return _edges(self._matrices[step % len(self._matrices)])


class OwnFunction(GraphFamily):
    """A pure function (replicas, step, **options) -> a matrix, or {(source, to): weight}.

    The matrix is [to][source]: column j is what j gives to each, with what it keeps. A parameter ``peers`` is given the
    number of ``peers``. A function whose matrices change with the step declares after how many they repeat: by an
    option ``period``, or an attribute of the function.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, dict(options)
        self._name = str(getattr(function, "__name__", function))
        try:
            parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
        except (TypeError, ValueError):
            parameters = {}
        self.takes_peers = "peers" in parameters
        declared = getattr(function, "period", 1)
        if "period" not in parameters:
            declared = self._options.pop("period", declared)
        if not isinstance(declared, int) or isinstance(declared, bool) or declared < 1:
            raise ValueError(f"{self._name}: period = {declared!r}: a whole number of at least 1")
        self._period = declared

    def problems(self, replicas: int) -> list[str]:
        try:
            self._matrix(replicas, 0, 1)
        except ValueError as error:
            return [str(error)]
        return []

    def period(self, replicas: int, peers: int) -> int:
        """As declared; that the next one begins so is seen."""
        first, again = (self._matrix(replicas, step, peers) for step in (0, self._period))
        if not np.array_equal(first, again, equal_nan=True):
            raise ValueError(
                f"{self._name}: its matrices of steps 0 and {self._period} differ, where its period is {self._period}: "
                f"graph = dict(type={self._name}, period=...) declares another. Every process calls it, and all must "
                f"get the same: what is random in it is seeded, with the step say"
            )
        return self._period

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        return _edges(self._matrix(replicas, step, peers))

    def _matrix(self, replicas: int, step: int, peers: int) -> np.ndarray:
        """float64 [replicas, replicas]."""
        where = f"{self._name}(replicas={replicas}, step={step})"
        try:
            value = self._function(replicas, step, **({"peers": peers} if self.takes_peers else {}), **self._options)
        except Exception as error:
            raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
        try:
            matrix = _from_edges(value, replicas) if isinstance(value, Mapping) else _real(value)
        except (TypeError, ValueError, IndexError) as error:
            matrix, why = np.empty(0), f"{type(value).__name__} ({error})"
        else:
            why = f"an array of shape {matrix.shape}"
        if matrix.shape != (replicas, replicas):
            raise ValueError(
                f"{where} is to return {replicas} rows of {replicas} numbers, or {{(source, to): weight}} with "
                f"replicas from 0 to {replicas - 1}, but returned {why}"
            )
        return matrix


def _edges(matrix: np.ndarray) -> Sends:
    return [(int(source), int(to), float(matrix[to, source])) for to, source in np.argwhere(matrix != 0)]


def _from_edges(edges: Mapping[Any, Any], replicas: int) -> np.ndarray:
    matrix = np.zeros((replicas, replicas))
    for edge, weight in edges.items():
        source, to = map(operator.index, edge)
        if not (0 <= source < replicas and 0 <= to < replicas):
            raise ValueError(f"{edge!r}: {weight!r}")
        matrix[to, source] = _real(weight)
    return matrix


def _real(value: Any) -> np.ndarray:
    """float64.

    Raises:
        TypeError, ValueError: these are no real numbers, or rows are not equally long.
    """
    array = np.array(value)
    if array.dtype.kind not in "biufO":
        raise ValueError(f"{array.dtype} in the place of real numbers")
    return array.astype(np.float64)
