"""What the ways of a table send: bytes of one party in one step, rows alone (their ids are apart). No torch.

A *party* is a rank; where rows are added up inside of hosts before they leave them, a host. Source: Parallax
(1808.02621), section 3.1.
"""

from __future__ import annotations

from typing import Literal

from colossus.comm.accounting import sent

WayName = Literal["dense", "gather", "owners"]

#: of all that send equally many bytes the first is taken: owners hold a table once
WAYS: tuple[WayName, ...] = ("owners", "gather", "dense")


def bytes_sent(way: WayName, parties: int, size: float, alpha: float) -> float:
    """What one of N = ``parties`` sends in a step.

    Dense all-reduce 2 w (N - 1) / N; gather of rows alpha w (N - 1); owners 2 alpha w (N - 1) / N: rows to who looks
    them up, and their gradients back, the most of it elsewhere.

    Args:
        size: w, bytes of the table as one rank computes with it (of a table split by features, the rank's features).
        alpha: the part of its rows that a party touches in a step.
    """
    if way == "dense":
        return sent("all_reduce", parties, size)
    if way == "gather":
        return sent("all_gather", parties, alpha * size)
    return 2 * sent("all_to_all", parties, alpha * size)


def union_of_uniform(alpha: float, members: int) -> float:
    """The part of the rows that several touch together, where ids are uniform and independent: 1 - (1 - alpha)^m."""
    return 1.0 - (1.0 - alpha) ** members
