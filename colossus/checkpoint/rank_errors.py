"""Work that fails on all ranks if it fails on one: no rank waits in a collective for one that has given up."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TypeVar

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, in_words
from colossus.comm.objects import all_gather_object, await_all
from colossus.context.groups import AxisGroup

T = TypeVar("T")


def on_all_ranks(group: AxisGroup, work: Callable[[], T], consequence: str = "", names_ranks: bool = True) -> T:
    """Do this rank's part of some work. Collective.

    The work itself may be collective if it fails on all ranks alike.

    Args:
        group: the ranks that work.
        work: this rank's part.
        consequence: text that is added to the message of an error.
        names_ranks: whether the message names the ranks that failed, if not all did.

    Raises:
        DamagedCheckpoint: on all ranks, if every rank that failed raised one.
        CheckpointError: on all ranks, if the work failed on any: which, and why.
    """
    done: list[T] = []
    gather_on_all_ranks(group, lambda: done.append(work()), consequence, names_ranks)
    return done[0]


def gather_on_all_ranks(
    group: AxisGroup, work: Callable[[], T], consequence: str = "", names_ranks: bool = True
) -> list[T]:
    """Do this rank's part of some work, and return the results of all ranks, in one collective. See `on_all_ranks`."""
    done: list[T] = []
    error: Exception | None = None
    problem: tuple[bool, str, str] | None = None
    try:
        done.append(work())
    except Exception as raised:
        error, problem = raised, (isinstance(raised, DamagedCheckpoint), in_words(raised), platform.node())
    await_all(group)
    gathered = all_gather_object((problem, done), group)
    problems = [entry for entry, _ in gathered]
    if not any(problems):
        return [result for _, (result,) in gathered]
    failed = [(rank, entry) for rank, entry in zip(group.ranks, problems, strict=True) if entry is not None]
    rank, (_, text, node) = failed[0]
    if names_ranks and len(failed) < group.size:
        more = f" and {len(failed) - 1} more ranks" if len(failed) > 1 else ""
        text = f"{text} (rank {rank} on {node}{more})"
    is_damaged = all(entry[0] for _, entry in failed)
    raise (DamagedCheckpoint if is_damaged else CheckpointError)(text + consequence) from error
