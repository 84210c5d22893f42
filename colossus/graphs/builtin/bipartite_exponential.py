"""The bipartite exponential graph of SGP's own code (its DynamicBipartiteExponentialGraph), as AD-PSGD needs it."""

from __future__ import annotations

import math

from colossus.graphs.family import GraphFamily, Sends
from colossus.graphs.weights import cycled
from colossus.registry import GRAPHS


@GRAPHS.register("bipartite_exponential")
class BipartiteExponential(GraphFamily):
    """Odd replicas exchange with even ones: 1, 3, 5, 9, .. hops forward, and as far backward.

    In each step an odd one exchanges with the next ``peers`` of these, both ways with the same weight 1 / (p + 1). So
    with one peer a step is a matching of pairs, each of which has its mean then; all steps are doubly stochastic.
    """

    def most_peers(self, replicas: int) -> int:
        return len(self._hops(replicas))

    def problems(self, replicas: int) -> list[str]:
        if replicas % 2:
            return [
                f"pairs odd replicas with even ones, so their number must be even, got {replicas} "
                f"(odd: {replicas // 2}, even: {replicas // 2 + 1})"
            ]
        return []

    def period(self, replicas: int, peers: int) -> int:
        count = len(self._hops(replicas))
        return count // math.gcd(count, peers)

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        share = 1.0 / (peers + 1)
        edges = [(source, source, share) for source in range(replicas)]
        for hop in cycled(self._hops(replicas), step, peers):
            for odd in range(1, replicas, 2):
                even = (odd + hop) % replicas
                edges += [(odd, even, share), (even, odd, share)]
        return edges

    @staticmethod
    def _hops(replicas: int) -> list[int]:
        hops, power = [1, replicas - 1], 2
        while power < replicas:
            hops += [(1 + power) % replicas, -(1 + power) % replicas]
            power *= 2
        return list(dict.fromkeys(hops))
