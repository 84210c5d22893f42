"""Collectives of small pickled objects, for setup rather than for every step; accounting does not count them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed as dist

from colossus.context.groups import AxisGroup, store_of

T = TypeVar("T")

#: how long a rank waits for others that read or write files, which may take longer than a collective may
PATIENCE = timedelta(minutes=30)
#: the shortest and the longest pause between two looks at the store, in seconds
_POLL = (0.001, 0.1)


def await_all(group: AxisGroup) -> None:
    """Wait until all ranks of the group have come here: the host waits by the store, longer than a collective may take.

    Raises:
        RuntimeError: some have not come within `PATIENCE`.
    """
    if group.process_group is None or group.is_fake:
        return
    store = store_of(group.process_group)
    # nobody comes for the second time before all have come for the first
    everyone = -(-store.add("arrivals", 1) // group.size) * group.size
    deadline, pause = time.monotonic() + PATIENCE.total_seconds(), _POLL[0]
    while (arrivals := store.add("arrivals", 0)) < everyone:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{everyone - arrivals} of the {group.size} ranks over {group} have not done their part within "
                f"{PATIENCE}: their logs say what they do"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL[1])


def all_gather_object(value: T, group: AxisGroup) -> list[T]:
    """Return the values of all ranks of the group, in group order, on each of them."""
    out = [value] * group.size
    if group.process_group is not None and not group.is_fake:
        dist.all_gather_object(out, value, group=group.process_group)
    return out


def broadcast_object(value: T, group: AxisGroup, source: int) -> T:
    """Return the value of the rank at index ``source`` of the group; the values of the others are ignored."""
    out = [value]
    if group.process_group is not None and not group.is_fake:
        dist.broadcast_object_list(out, src=group.ranks[source], group=group.process_group)
    return out[0]


def gather_object(value: T, group: AxisGroup) -> list[T] | None:
    """Return the values of all ranks, in group order, on the first rank of the group; None on the others."""
    if group.process_group is None or group.is_fake:
        return [value] * group.size
    out: list[Any] | None = [None] * group.size if group.index == 0 else None
    dist.gather_object(value, out, dst=group.ranks[0], group=group.process_group)
    return out
