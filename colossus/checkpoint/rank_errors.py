"""What fails on one rank fails on all of them: nobody waits in a collective for a rank that has given up."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TypeVar

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, in_words
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup

T = TypeVar("T")


def on_all_ranks(group: AxisGroup, work: Callable[[], T], consequence: str = "", tells_ranks: bool = True) -> T:
    """Do this rank's part of some work; collective, and so may the work be where it fails on all ranks alike.

    Args:
        consequence: what it means that the work was not done.
        tells_ranks: whether the message says where it failed, when it did not everywhere.

    Raises:
        DamagedCheckpoint: on all ranks, when on every rank that failed it was one.
        CheckpointError: on all ranks, when the work failed on any: which, and why.
    """
    done: list[T] = []
    gather_on_all_ranks(group, lambda: done.append(work()), consequence, tells_ranks)
    return done[0]


def gather_on_all_ranks(
    group: AxisGroup, work: Callable[[], T], consequence: str = "", tells_ranks: bool = True
) -> list[T]:
    """`on_all_ranks`, with what the work gave on each of them, in one collective."""
    done: list[T] = []
    error: Exception | None = None
    problem: tuple[bool, str, str] | None = None
    try:
        done.append(work())
    except Exception as raised:
        error, problem = raised, (isinstance(raised, DamagedCheckpoint), in_words(raised), platform.node())
    gathered = all_gather_object((problem, done), group)
    problems = [each for each, _ in gathered]
    if not any(problems):
        return [given for _, (given,) in gathered]
    failed = [(rank, told) for rank, told in zip(group.ranks, problems, strict=True) if told is not None]
    rank, (_, text, node) = failed[0]
    if tells_ranks and len(failed) < group.size:
        more = f" and {len(failed) - 1} more ranks" if len(failed) > 1 else ""
        text = f"{text} (rank {rank} on {node}{more})"
    is_damaged = all(told[0] for _, told in failed)
    raise (DamagedCheckpoint if is_damaged else CheckpointError)(text + consequence) from error
