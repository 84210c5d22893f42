"""The complete graph: everybody sends to everybody."""

from __future__ import annotations

from colossus.graphs.family import GraphFamily, Sends
from colossus.registry import GRAPHS


@GRAPHS.register("complete")
class Complete(GraphFamily):
    """Every replica sends to all others, with weight 1 / n: the mean in one step."""

    takes_peers = False

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        share = 1.0 / replicas
        return [(source, to, share) for source in range(replicas) for to in range(replicas)]
