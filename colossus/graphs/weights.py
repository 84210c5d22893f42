"""Weights of edges, where a graph says only who its neighbours are. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from colossus.graphs.family import Sends


def uniform(replicas: int, hops: Sequence[int]) -> Sends:
    """Everybody sends to those ``hops`` replicas further on, modulo their number, and keeps as much: 1 / (p + 1)."""
    share = 1.0 / (len(hops) + 1)
    return [(source, (source + hop) % replicas, share) for hop in (0, *hops) for source in range(replicas)]


def cycled(entries: Sequence[int], step: int, count: int) -> list[int]:
    """The next ``count`` entries in each step, around."""
    return [entries[(step * count + number) % len(entries)] for number in range(count)]


def metropolis(neighbours: Sequence[Collection[int]]) -> Sends:
    """Weights that make any undirected graph doubly stochastic: 1 / (1 + the larger of both degrees) on an edge.

    Metropolis weights of Xiao, Boyd and Lall ("Distributed average consensus with time-varying Metropolis weights",
    2006). On a ring they are the 1/3 of 1705.09056.

    Args:
        neighbours: of each replica, without itself; symmetric.
    """
    edges: Sends = []
    for source, others in enumerate(neighbours):
        kept = 1.0
        for to in others:
            weight = 1.0 / (1 + max(len(others), len(neighbours[to])))
            edges.append((source, to, weight))
            kept -= weight
        edges.append((source, source, kept))
    return edges


def undirected(replicas: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The neighbours of each replica, in order; an edge of a replica to itself is none."""
    found: list[set[int]] = [set() for _ in range(replicas)]
    for one, other in edges:
        if one != other:
            found[one].add(other)
            found[other].add(one)
    return [sorted(others) for others in found]
