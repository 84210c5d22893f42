"""Ids that are not in a table, told with their place in the batch."""

from __future__ import annotations

from torch import Tensor

from colossus.context.parallel_context import ParallelContext


def outside(ids: Tensor, num_rows: int) -> bool:
    """Whether any id is none of the table's 0..num_rows - 1."""
    if not ids.numel():
        return False
    low, high = ids.aminmax()
    return int(low) < 0 or int(high) >= num_rows


def in_words(name: str, ids: Tensor, num_rows: int, context: ParallelContext) -> str:
    """Which rank was given the first such id, in which row of its batch.

    Args:
        ids: of a microbatch, [samples, ..].
    """
    place = ((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist()
    microbatch = context.rng.microbatch
    where = "its only id"
    if place:
        row = microbatch * len(ids) + place[0]
        inside = f", place {', '.join(map(str, place[1:]))} of it" if place[1:] else ""
        where = f"row {row} of its batch{inside}" + (f" (microbatch {microbatch})" if microbatch else "")
    return (
        f"table {name!r} has ids 0..{num_rows - 1}, but rank {context.rank} was given id {int(ids[tuple(place)])} in "
        f"{where}: make the table larger, or check the data"
    )
