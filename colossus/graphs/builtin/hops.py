"""The graphs of SGP's own code, whose edges change from step to step, with hops of growing length."""

from __future__ import annotations

import math

from colossus.graphs.graph_family import GraphFamily, Sends, cycled, uniform
from colossus.registry import GRAPHS


@GRAPHS.register("exponential")
class Exponential(GraphFamily):
    """Every replica sends j (p + 1)^i hops forward in step t, j = 1..p, i = t mod the period; weights are equal.

    The directed exponential graph of Stochastic Gradient Push (1811.10792, appendix A). p = ``peers``. With one peer
    the hops are 1, 2, 4, ..; n = (p + 1)^m replicas have the exact mean after m steps. Hops are modulo n; a replica
    keeps what a hop of n would send.
    """

    def period(self, replicas: int, peers: int) -> int:
        power, period = peers + 1, 1
        while power < replicas:
            power, period = power * (peers + 1), period + 1
        return period

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        base = (peers + 1) ** (step % self.period(replicas, peers))
        return uniform(replicas, [hop * base for hop in range(1, peers + 1)])


class _Cycled(GraphFamily):
    """Base of graphs that take the next ``peers`` hops of a list in each step."""

    def hops(self, replicas: int) -> list[int]:
        raise NotImplementedError

    def most_peers(self, replicas: int) -> int:
        return len(self.hops(replicas))

    def period(self, replicas: int, peers: int) -> int:
        count = len(self.hops(replicas))
        return count // math.gcd(count, peers)


@GRAPHS.register("linear")
class Linear(_Cycled):
    """Replicas send 1, 3, 5, .. hops forward and as far backward, the next ``peers`` of these in each step.

    SGP's DynamicDirectedLinearGraph. In one period a replica sends to every second one, or, if their number is odd, to
    all others. Weights are equal.
    """

    def hops(self, replicas: int) -> list[int]:
        both = ((hop, replicas - hop) for hop in range(1, replicas, 2))
        return list(dict.fromkeys(hop for pair in both for hop in pair))

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        return uniform(replicas, cycled(self.hops(replicas), step, peers))


@GRAPHS.register("bipartite_exponential")
class BipartiteExponential(_Cycled):
    """Odd replicas exchange with even ones: 1, 3, 5, 9, .. hops forward, and as far backward.

    SGP's DynamicBipartiteExponentialGraph, as AD-PSGD needs it. In each step an odd replica exchanges over the next
    ``peers`` of these hops, both ways with the same weight 1 / (p + 1). So with one peer a step is a matching, and each
    pair then has its mean; all steps are doubly stochastic.
    """

    def hops(self, replicas: int) -> list[int]:
        hops, power = [1, replicas - 1], 2
        while power < replicas:
            hops += [(1 + power) % replicas, -(1 + power) % replicas]
            power *= 2
        return list(dict.fromkeys(hops))

    def problems(self, replicas: int) -> list[str]:
        if replicas % 2:
            return [
                f"pairs odd replicas with even ones, so their number must be even, got {replicas} "
                f"(odd: {replicas // 2}, even: {replicas // 2 + 1})"
            ]
        return []

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        share = 1.0 / (peers + 1)
        edges = [(source, source, share) for source in range(replicas)]
        for hop in cycled(self.hops(replicas), step, peers):
            for odd in range(1, replicas, 2):
                even = (odd + hop) % replicas
                edges += [(odd, even, share), (even, odd, share)]
        return edges
