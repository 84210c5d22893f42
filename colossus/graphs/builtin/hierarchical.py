"""A hierarchical graph: complete inside a host, another graph between hosts."""

from __future__ import annotations

from typing import Any

from colossus.graphs.graph_family import GraphFamily, Sends
from colossus.graphs.spec import make_family
from colossus.registry import GRAPHS


@GRAPHS.register("hierarchical")
class Hierarchical(GraphFamily):
    """Two kinds of steps in turn: the mean inside each host, then ``between`` for equal places on all hosts.

    Replicas of a host have consecutive numbers. Two steps together are W x J / m: W is the matrix of ``between`` over
    hosts, and J / m the mean of the m replicas of a host. They send 1 / m of the messages of doing both in one step.
    The number of ``peers`` is that of ``between``.

    Args:
        per_host: replicas of each host.
        between: a graph over the hosts, as a config names it.
    """

    def __init__(self, per_host: int, between: Any = "exponential") -> None:
        self._per_host, self._between = per_host, make_family(between)
        self.takes_peers = self._between.takes_peers

    def most_peers(self, replicas: int) -> int:
        return self._between.most_peers(replicas // self._per_host)

    def problems(self, replicas: int) -> list[str]:
        per_host = self._per_host
        if per_host < 2 or replicas % per_host or replicas // per_host < 2:
            return [f"per_host = {per_host}: {replicas} replicas are not two or more hosts of {max(2, per_host)}"]
        hosts = replicas // per_host
        return [f"between {hosts} hosts: {problem}" for problem in self._between.problems(hosts)]

    def period(self, replicas: int, peers: int) -> int:
        return 2 * self._between.period(replicas // self._per_host, peers)

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        size = self._per_host
        hosts = replicas // size
        if step % 2 == 0:
            return [
                (host * size + one, host * size + other, 1.0 / size)
                for host in range(hosts) for one in range(size) for other in range(size)
            ]  # fmt: skip
        edges = self._between.sends(hosts, step // 2, peers)
        return [
            (source * size + index, to * size + index, weight) for source, to, weight in edges for index in range(size)
        ]
