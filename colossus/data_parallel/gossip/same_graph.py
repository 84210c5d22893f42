"""All processes must mix by the same graph, also where a function of the user's own gives it."""

from __future__ import annotations

import hashlib

import numpy as np

from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.graphs.graph import Graph

#: digits after the point that are compared: processors may differ in the last bits of a weight
_DIGITS = 9


def require_same_graph(graph: Graph, context: ParallelContext) -> None:
    """Collective over all ranks.

    Raises:
        ValueError: on all of them, when one has other matrices.
    """
    digests = all_gather_object(_digest(graph), context.group(context.grid.names))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        named = ", ".join(map(str, different[:8])) + (", .." if len(different) > 8 else "")
        raise ValueError(
            f"parallel.strategy.graph: rank {named} has got other matrices than rank 0: every process calls the "
            f"function, and must get the same. What is random in it is to be seeded with the step or train.seed, and "
            f"nothing may depend on the host, the rank, or the order of a set"
        )


def _digest(graph: Graph) -> bytes:
    found = hashlib.sha256()
    for phase in graph.phases:
        found.update(repr((phase.start, phase.peers, phase.period)).encode())
        for matrix in phase.matrices:
            found.update((np.round(matrix, _DIGITS) + 0.0).tobytes())  # + 0.0: there is no -0
    return found.digest()
