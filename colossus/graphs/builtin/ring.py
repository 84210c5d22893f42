"""The ring: everybody exchanges with both neighbours."""

from __future__ import annotations

from colossus.graphs.family import GraphFamily, Sends
from colossus.graphs.weights import metropolis, undirected, uniform
from colossus.registry import GRAPHS


@GRAPHS.register("ring")
class Ring(GraphFamily):
    """Every replica exchanges with the one before and the one after it, with weight 1/3 (1705.09056, section 6).

    Args:
        directed: it sends to the one after it only, with weight 1/2.
    """

    takes_peers = False

    def __init__(self, directed: bool = False) -> None:
        if not isinstance(directed, bool):
            raise ValueError(f"directed = {directed!r}: True or False")
        self._directed = directed

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        if self._directed:
            return uniform(replicas, [1])
        return metropolis(undirected(replicas, ((index, (index + 1) % replicas) for index in range(replicas))))
