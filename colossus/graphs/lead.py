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
        matrix_of: the matrix of a step.
        starts: the steps s to look at: all those after which the graph goes on differently.
        period: steps after which it repeats, or the longest of several.

    Raises:
        ValueError: for a graph in which some replica hears nothing of another.
    """
    largest = 0
    for start in starts:
        #: [replica, origin]: the first step from which the replica's messages are held up by the origin
        first = np.full((replicas, replicas), _NEVER)
        np.fill_diagonal(first, start)
        step, quiet = start, 0
        while (first == _NEVER).any():
            matrix = matrix_of(step)
            reached = False
            for to, source in np.argwhere(matrix != 0):
                if to == source:
                    continue
                new = (first[source] <= step) & (first[to] > step + overlap + 1)
                if new.any():
                    first[to][new] = step + overlap + 1
                    largest = max(largest, step + overlap - (start - 1))
                    reached = True
            step, quiet = step + 1, 0 if reached else quiet + 1
            if quiet > 2 * period + overlap:
                raise ValueError("some replica never hears of another: the graph is not connected")
    return largest
