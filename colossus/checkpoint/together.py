"""What fails on one rank fails on all of them: nobody waits in a collective for a rank that has given up."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TypeVar

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, in_words
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup

T = TypeVar("T")


def on_all_ranks(group: AxisGroup, work: Callable[[], T], consequence: str = "") -> T:
    """Do this rank's part of some work; collective, and so may the work be where it fails on all ranks alike.

    Args:
        consequence: what it means that the work was not done.

    Raises:
        DamagedCheckpoint: on all ranks, when on every rank that failed it was one.
        CheckpointError: on all ranks, when the work failed on any: which, and why.
    """
    done: list[T] = []
    error: Exception | None = None
    problem: tuple[bool, str] | None = None
    try:
        done.append(work())
    except Exception as raised:
        error, problem = raised, (isinstance(raised, DamagedCheckpoint), in_words(raised))
    problems = all_gather_object(problem, group)
    if not any(problems):
        return done[0]
    failed = [rank for rank, of_rank in zip(group.ranks, problems, strict=True) if of_rank is not None]
    is_damaged, text = next(each for each in problems if each is not None)
    if len(failed) < group.size:
        where = f" on {platform.node()}" if error is not None else ""
        text += f" (rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed[:8]))}{where} of {group.size})"
    is_damaged = all(each[0] for each in problems if each is not None)
    raise (DamagedCheckpoint if is_damaged else CheckpointError)(text + consequence) from error
