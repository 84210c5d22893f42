"""A graph as a config names it: a name, a dict with options, a function or matrices of the user's own. No torch."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from colossus.config.components import option_problems
from colossus.config.section import Named
from colossus.graphs.graph_family import GraphFamily, Sends
from colossus.registry import GRAPHS


def make_family(spec: Any) -> GraphFamily:
    """Return the family of graphs that ``spec`` names.

    Args:
        spec: a name of `GRAPHS`; ``dict(type=name or callable, **options)``; a function, see `OwnFunction`; a matrix or
            a list of them, see `OwnMatrices`; or a family.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    if isinstance(spec, GraphFamily):
        return spec
    options = dict(spec) if isinstance(spec, Mapping) else {"type": spec}
    if "type" not in options:
        raise ValueError(
            f'a graph needs a type: dict(type="exponential", **options); types: {", ".join(GRAPHS.names())}'
        )
    kind = options.pop("type")
    make = GRAPHS.get(kind) if isinstance(kind, str) else kind
    if _is_matrices(kind):
        make, options = OwnMatrices, {"matrices": kind, **options}
    if not callable(make):
        raise ValueError(
            f"must be a name ({', '.join(GRAPHS.names())}), a function (replicas, step) -> matrix, or matrices, got "
            f"{make!r}"
        )
    if inspect.isclass(make) and issubclass(make, GraphFamily):
        if problems := option_problems("graph", Named(type=make, **options), GRAPHS):
            raise ValueError("; ".join(problems))
        return make(**options)
    return OwnFunction(make, options)


def name_of_graph(spec: Any) -> str:
    """Return the name of a graph in messages; empty for matrices."""
    if isinstance(spec, Mapping):
        return name_of_graph(spec.get("type"))
    if isinstance(spec, str) or _is_matrices(spec):
        return spec if isinstance(spec, str) else ""
    return str(getattr(spec, "__name__", type(spec).__name__))


def _is_matrices(value: Any) -> bool:
    """Return whether a value is meant as a matrix or a list of matrices: an array, or lists of lists."""
    if isinstance(value, np.ndarray):
        return True
    return isinstance(value, list | tuple) and all(isinstance(row, list | tuple | np.ndarray) for row in value)


class OwnMatrices(GraphFamily):
    """One matrix, or one for each step in turn. Column j has the weights that j sends: x becomes ``matrix @ x``."""

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

    The matrix is [to][source]: column j has the weights that j sends to each, and the one that it keeps. A parameter
    ``peers`` receives the number of ``peers``. A function whose matrices change with the step declares after how many
    steps they repeat, by an option ``period`` or an attribute of the function.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, dict(options)
        self._name = str(getattr(function, "__name__", function))
        parameters = inspect.signature(function).parameters
        self.takes_peers = "peers" in parameters
        declared = getattr(function, "period", 1)
        if "period" not in parameters:
            declared = self._options.pop("period", declared)
        if not isinstance(declared, int) or declared < 1:
            raise ValueError(f"{self._name}: period = {declared!r}: a whole number of at least 1")
        self._period = declared

    def period(self, replicas: int, peers: int) -> int:
        """Return the declared period, after a check that the matrix of the next period's first step is the same."""
        first, again = (self._matrix(replicas, step, peers) for step in (0, self._period))
        if not np.array_equal(first, again, equal_nan=True):
            raise ValueError(
                f"{self._name}: its matrices of steps 0 and {self._period} differ, where its period is {self._period}: "
                f"graph = dict(type={self._name}, period=...) declares another. Every process calls it, and all must "
                f"get the same: seed random numbers in it, with the step, for example"
            )
        return self._period

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        return _edges(self._matrix(replicas, step, peers))

    def _matrix(self, replicas: int, step: int, peers: int) -> np.ndarray:
        """Return the function's matrix, float64 [replicas, replicas]."""
        where = f"{self._name}(replicas={replicas}, step={step})"
        try:
            value = self._function(replicas, step, **({"peers": peers} if self.takes_peers else {}), **self._options)
            matrix = _from_edges(value, replicas) if isinstance(value, Mapping) else _real(value)
        except Exception as error:
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
        if matrix.shape != (replicas, replicas):
            raise ValueError(
                f"{where} must return {replicas} rows of {replicas} numbers, or {{(source, to): weight}}, but returned "
                f"an array of shape {matrix.shape}"
            )
        return matrix


def _edges(matrix: np.ndarray) -> Sends:
    return [(int(source), int(to), float(matrix[to, source])) for to, source in np.argwhere(matrix != 0)]


def _from_edges(edges: Mapping[Any, Any], replicas: int) -> np.ndarray:
    matrix = np.zeros((replicas, replicas))
    for edge, weight in edges.items():
        source, to = map(operator.index, edge)
        if not (0 <= source < replicas and 0 <= to < replicas):
            raise ValueError(f"edge {edge!r}, but replicas are 0 to {replicas - 1}")
        matrix[to, source] = weight
    return matrix


def _real(value: Any) -> np.ndarray:
    array = np.array(value)
    if array.dtype.kind not in "biufO":
        raise ValueError(f"the entries are {array.dtype}, not real numbers")
    return array.astype(np.float64)
