"""The directed linear graph of SGP's own code (its DynamicDirectedLinearGraph): hops that grow by two."""

from __future__ import annotations

import math

from colossus.graphs.family import GraphFamily, Sends
from colossus.graphs.weights import cycled, uniform
from colossus.registry import GRAPHS


@GRAPHS.register("linear")
class Linear(GraphFamily):
    """Replicas send 1, 3, 5, .. hops forward and as far backward, the next ``peers`` of these in each step.

    So in one period everybody sends to every second one, or, of an odd number of replicas, to all others. Weights are
    equal.
    """

    def most_peers(self, replicas: int) -> int:
        return len(self._hops(replicas))

    def period(self, replicas: int, peers: int) -> int:
        count = len(self._hops(replicas))
        return count // math.gcd(count, peers)

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        return uniform(replicas, cycled(self._hops(replicas), step, peers))

    @staticmethod
    def _hops(replicas: int) -> list[int]:
        both = ((hop, replicas - hop) for hop in range(1, replicas, 2))
        return list(dict.fromkeys(hop for pair in both for hop in pair))
