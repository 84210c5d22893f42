"""Complete inside a host, another graph between hosts."""

from __future__ import annotations

from typing import Any

from colossus.graphs.graph_family import GraphFamily, Sends
from colossus.graphs.spec import make_family
from colossus.registry import GRAPHS


@GRAPHS.register("hierarchical")
class Hierarchical(GraphFamily):
    """In turn: all replicas of a host take their mean, then each mixes with its like on other hosts by ``between``.

    Replicas of a host have numbers in a row. Two steps together are W x J / m, W being the matrix of ``between`` over
    hosts and J / m the mean of the m replicas of a host, with 1 / m of the messages of doing both in one step. The
    number of ``peers`` is that of ``between``.

    Args:
        hosts: how many there are; or
        per_host: how many replicas each has.
        between: a graph over the hosts, as a config names it.
    """

    def __init__(self, hosts: int | None = None, per_host: int | None = None, between: Any = "exponential") -> None:
        given = {"hosts": hosts, "per_host": per_host}
        for name, number in given.items():
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 2):
                raise ValueError(f"{name} = {number!r}: a whole number of at least 2")
        if (hosts is None) == (per_host is None):
            raise ValueError(
                "hierarchical: give one of hosts and per_host (replicas of a host): "
                'graph = dict(type="hierarchical", per_host=8)'
            )
        self._given, self._number = next(item for item in given.items() if item[1] is not None)
        self._between = make_family(between)
        self.takes_peers = self._between.takes_peers

    def most_peers(self, replicas: int) -> int:
        return self._between.most_peers(self._hosts(replicas))

    def problems(self, replicas: int) -> list[str]:
        number = self._number
        assert number is not None
        if replicas % number or replicas // number < 2:
            other = "replicas on each" if self._given == "hosts" else "hosts"
            return [f"{self._given} = {number}: {replicas} replicas are not {number} x 2 or more {other}"]
        hosts = self._hosts(replicas)
        return [f"between {hosts} hosts: {problem}" for problem in self._between.problems(hosts)]

    def period(self, replicas: int, peers: int) -> int:
        return 2 * self._between.period(self._hosts(replicas), peers)

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        hosts = self._hosts(replicas)
        size = replicas // hosts
        if step % 2 == 0:
            inside = [(one, other) for one in range(size) for other in range(size)]
            return [
                (host * size + one, host * size + other, 1.0 / size) for host in range(hosts) for one, other in inside
            ]
        edges = self._between.sends(hosts, step // 2, peers)
        return [
            (source * size + index, to * size + index, weight) for source, to, weight in edges for index in range(size)
        ]

    def _hosts(self, replicas: int) -> int:
        assert self._number is not None
        return self._number if self._given == "hosts" else replicas // self._number
