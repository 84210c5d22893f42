"""The star: everybody exchanges with the first."""

from __future__ import annotations

from colossus.graphs.family import GraphFamily, Sends
from colossus.graphs.weights import metropolis, undirected
from colossus.registry import GRAPHS


@GRAPHS.register("star")
class Star(GraphFamily):
    """Replica 0 exchanges with all others, with Metropolis weights: 1 / n on each edge."""

    takes_peers = False

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        return metropolis(undirected(replicas, ((0, other) for other in range(1, replicas))))
