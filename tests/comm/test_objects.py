"""Objects between the ranks of a group."""

from __future__ import annotations

import time
from typing import Any

from helpers.ranks import grid, run_ranks

from colossus.comm.objects import all_gather_object, await_all, broadcast_object
from colossus.context.parallel_context import ParallelContext


def _exchanged(context: ParallelContext) -> tuple[Any, ...]:
    rows, all_ranks = context.group("data"), context.group(("tensor", "data"))
    return (
        all_gather_object({"rank": context.rank}, rows),
        broadcast_object((context.rank, "x"), rows, 1),
        broadcast_object(context.rank, all_ranks, 1),  # the second in the order of the group, not rank 1
        all_gather_object(context.rank, context.group("pipeline")),
        broadcast_object(context.rank, context.group("pipeline"), 0),
    )


def test_objects_reach_the_ranks_of_the_group_in_its_order() -> None:
    for rank, found in enumerate(run_ranks(4, _exchanged, plan=grid(data=2, tensor=2))):
        column = rank % 2
        pair = [{"rank": column}, {"rank": column + 2}]
        assert found == (pair, (column + 2, "x"), 2, [rank], rank)


def _late(rank: int) -> list[list[int]]:
    """The second rank takes longer for its part than a collective may."""
    context, found = ParallelContext(grid(data=2), rank, timeout_seconds=0.4), []
    for number in range(2):
        if rank == number:
            time.sleep(0.8)
        await_all(context.group("data"))
        found.append(all_gather_object(rank, context.group("data")))
    context.close()
    return found


def test_ranks_wait_longer_for_files_than_for_a_collective() -> None:
    assert run_ranks(2, _late, with_context=False) == [[[0, 1]] * 2] * 2
