"""The directed exponential graph of Stochastic Gradient Push (1811.10792, appendix A)."""

from __future__ import annotations

from colossus.graphs.family import GraphFamily, Sends
from colossus.graphs.weights import uniform
from colossus.registry import GRAPHS


@GRAPHS.register("exponential")
class Exponential(GraphFamily):
    """At step t every replica sends to those j (p + 1)^i hops away, j = 1..p, i = t mod the period; equal weights.

    p = ``peers``. With one peer the hops are 1, 2, 4, ..; n = (p + 1)^m replicas have the exact mean after m steps.
    Hops are modulo n; what a hop of n would send is kept.
    """

    def period(self, replicas: int, peers: int) -> int:
        power, period = peers + 1, 1
        while power < replicas:
            power, period = power * (peers + 1), period + 1
        return period

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        base = (peers + 1) ** (step % self.period(replicas, peers))
        return uniform(replicas, [hop * base for hop in range(1, peers + 1)])
