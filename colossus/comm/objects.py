"""Collectives of small pickled objects, for setup rather than for every step; accounting does not count them."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import distributed as dist

from colossus.context.groups import AxisGroup

T = TypeVar("T")


def all_gather_object(value: T, group: AxisGroup) -> list[T]:
    """Return the values of all ranks of the group, in group order, on each of them."""
    out = [value] * group.size
    if group.process_group is not None:
        dist.all_gather_object(out, value, group=group.process_group)
    return out


def broadcast_object(value: T, group: AxisGroup, source: int) -> T:
    """Return the value of the rank at index ``source`` of the group; the values of the others are ignored."""
    out = [value]
    if group.process_group is not None:
        dist.broadcast_object_list(out, src=group.ranks[source], group=group.process_group)
    return out[0]


def gather_object(value: T, group: AxisGroup) -> list[T] | None:
    """Return the values of all ranks, in group order, on the first rank of the group; None on the others."""
    if group.process_group is None:
        return [value]
    out: list[Any] | None = [None] * group.size if group.index == 0 else None
    dist.gather_object(value, out, dst=group.ranks[0], group=group.process_group)
    return out
