"""A family of graphs: a pure function of the number of replicas and the step, with the weights of edges. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

#: (source, to, weight): ``source`` sends to ``to``; (source, source, weight): it keeps; weights of equal edges add up
Sends = list[tuple[int, int, float]]


class GraphFamily:
    """Base of the graphs that a config can name. The arguments of ``__init__`` are options of the graph.

    Attributes:
        takes_peers: ``peers`` is the number of others to which a replica sends in a step.
    """

    takes_peers: bool = True

    def most_peers(self, replicas: int) -> int:
        """Return the largest possible ``peers``."""
        return replicas - 1

    def problems(self, replicas: int) -> list[str]:
        """Return why there is no such graph of so many replicas, in words; an empty list if there is."""
        return []

    def period(self, replicas: int, peers: int) -> int:
        """Return the number of steps after which the graph repeats."""
        return 1

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        """Return all edges of a step (from 0), including the weights that replicas keep."""
        raise NotImplementedError


def uniform(replicas: int, hops: Sequence[int]) -> Sends:
    """Return edges from every replica to those ``hops`` further on, modulo their number, with weights 1 / (p + 1)."""
    share = 1.0 / (len(hops) + 1)
    return [(source, (source + hop) % replicas, share) for hop in (0, *hops) for source in range(replicas)]


def cycled(entries: Sequence[int], step: int, count: int) -> list[int]:
    """Return the next ``count`` entries in each step, cyclically."""
    return [entries[(step * count + number) % len(entries)] for number in range(count)]


def metropolis(replicas: int, edges: Iterable[tuple[int, int]]) -> Sends:
    """Return weights that make any undirected graph doubly stochastic: 1 / (1 + the larger degree) on an edge.

    Metropolis weights of Xiao, Boyd and Lall ("Distributed average consensus with time-varying Metropolis weights",
    2006). On a ring they are the 1/3 of 1705.09056.

    Args:
        edges: pairs in either direction; an edge of a replica to itself is ignored.
    """
    adjacent: list[set[int]] = [set() for _ in range(replicas)]
    for one, other in edges:
        if one != other:
            adjacent[one].add(other)
            adjacent[other].add(one)
    neighbours: list[Collection[int]] = [sorted(others) for others in adjacent]
    sends: Sends = []
    for source, others in enumerate(neighbours):
        own_weight = 1.0
        for to in others:
            weight = 1.0 / (1 + max(len(others), len(neighbours[to])))
            sends.append((source, to, weight))
            own_weight -= weight
        sends.append((source, source, own_weight))
    return sends
