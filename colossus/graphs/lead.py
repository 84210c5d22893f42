"""How far replicas that wait for their peers can be apart. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

_NEVER = np.iinfo(np.int64).max


def largest_lead(
    matrix_of: Callable[[int], np.ndarray], replicas: int, starts: Iterable[int], overlap: int, period: int
) -> int:
    """By how many completed steps one replica can be ahead of another.

    Who mixes synchronously sends the messages of step t before it completes that step, and completes step t + k (k =
    ``overlap``) when it has those that its sources sent at step t. So what replica j does not send from step s on holds
    others up:

        first(j) = s;     first(i) = u + k + 1 for the first step u >= first(l) in which some l sends to i

    first(i) being the first step whose messages i does not send, since it does not complete step u + k. When j has sent
    the messages of step s - 1 and has not completed that step, i is u + k - (s - 1) ahead. The largest over all s, i
    and j, the longest of the shortest paths in time and one, is the answer.

    The same paths carry news: what j says in its messages from step s on, all know when they complete step
    s - 1 + lead. So who has just completed step t can name step t + lead for all to stop after.

    Args:
        matrix_of: the matrix of a step, the same object each time.
        starts: the steps s to look at: all those after which the graph goes on differently.
        period: steps after which it repeats, or the longest of several.

    Raises:
        ValueError: for a graph in which some replica hears nothing of another.
    """
    largest = 0
    known: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for start in starts:
        #: [replica, origin]: the first step from which the replica's messages are held up by the origin
        first = np.full((replicas, replicas), _NEVER)
        np.fill_diagonal(first, start)
        step, quiet = start, 0
        while (first == _NEVER).any():
            matrix = matrix_of(step)
            if id(matrix) not in known:
                known[id(matrix)] = _edges(matrix)
            reached, held_up = False, step + overlap + 1
            sends_not = first <= step
            for targets, sources in known[id(matrix)]:
                new = sends_not[sources] & (first[targets] > held_up)
                if new.any():
                    first[targets] = np.where(new, held_up, first[targets])
                    largest = max(largest, held_up - start)
                    reached = True
            step, quiet = step + 1, 0 if reached else quiet + 1
            if quiet > 2 * period + overlap:
                raise ValueError("some replica never hears of another: the graph is not connected")
    return largest


def _edges(matrix: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Targets and their sources, in arrays in which no target is twice."""
    groups: list[tuple[list[int], list[int]]] = []
    count = [0] * len(matrix)
    for target, source in np.argwhere(matrix != 0).tolist():
        if target != source:
            if count[target] == len(groups):
                groups.append(([], []))
            groups[count[target]][0].append(target)
            groups[count[target]][1].append(source)
            count[target] += 1
    return [(np.array(targets), np.array(sources)) for targets, sources in groups]
