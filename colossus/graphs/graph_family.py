"""What a kind of graph is: a pure function of the number of replicas and the step; weights of its edges. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

#: (source, to, weight): what ``source`` gives to ``to``, and (source, source, weight) what it keeps; same edges add up
Sends = list[tuple[int, int, float]]


class GraphFamily:
    """Base of the graphs that a config can name. The arguments of ``__init__`` are options of the graph.

    Attributes:
        takes_peers: whether ``peers`` says to how many others a replica sends in a step.
    """

    takes_peers: bool = True

    def most_peers(self, replicas: int) -> int:
        """The largest ``peers`` that it takes."""
        return replicas - 1

    def problems(self, replicas: int) -> list[str]:
        """Why there is no such graph of so many replicas, in words; nothing where there is."""
        return []

    def period(self, replicas: int, peers: int) -> int:
        """Steps after which it repeats."""
        return 1

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        """All edges of a step (from 0), with what each replica keeps."""
        raise NotImplementedError


def uniform(replicas: int, hops: Sequence[int]) -> Sends:
    """Everybody sends to those ``hops`` replicas further on, modulo their number, and keeps as much: 1 / (p + 1)."""
    share = 1.0 / (len(hops) + 1)
    return [(source, (source + hop) % replicas, share) for hop in (0, *hops) for source in range(replicas)]


def cycled(entries: Sequence[int], step: int, count: int) -> list[int]:
    """The next ``count`` entries in each step, around."""
    return [entries[(step * count + number) % len(entries)] for number in range(count)]


def metropolis(replicas: int, edges: Iterable[tuple[int, int]]) -> Sends:
    """Weights that make any undirected graph doubly stochastic: 1 / (1 + the larger of both degrees) on an edge.

    Metropolis weights of Xiao, Boyd and Lall ("Distributed average consensus with time-varying Metropolis weights",
    2006). On a ring they are the 1/3 of 1705.09056.

    Args:
        edges: in either direction; one of a replica to itself is none.
    """
    found: list[set[int]] = [set() for _ in range(replicas)]
    for one, other in edges:
        if one != other:
            found[one].add(other)
            found[other].add(one)
    neighbours: list[Collection[int]] = [sorted(others) for others in found]
    sends: Sends = []
    for source, others in enumerate(neighbours):
        kept = 1.0
        for to in others:
            weight = 1.0 / (1 + max(len(others), len(neighbours[to])))
            sends.append((source, to, weight))
            kept -= weight
        sends.append((source, source, kept))
    return sends
