"""Going on after a step that failed and that the user's loop caught: only when it failed alike on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import distributed as dist

from colossus.comm import log
from colossus.context.parallel_context import ParallelContext


def agree_on_failure(context: ParallelContext, run: int, before: Mapping[str, int]) -> None:
    """Return once every rank has come here after the same failure.

    A rank that has not failed waits in a collective, which whatever this one runs next would answer. So the ranks meet
    in the store, where nothing can be mistaken for something else.

    Args:
        run: number of the step or evaluation that failed, the same on all ranks.
        before: the collectives of this rank, by axes, that are not compared: ranks may differ in them.

    Raises:
        RuntimeError: when it failed on some ranks only, or after other collectives here than there.
    """
    size = context.world_size
    if size == 1:
        return
    store = context.store()
    keys = [f"failed/{run}/{rank}" for rank in range(size)]
    mine = {axes: count - before.get(axes, 0) for axes, count in log.counts().items()}
    mine = {axes: count for axes, count in mine.items() if count}
    store.set(keys[context.rank], json.dumps(mine))
    try:
        store.wait(keys, context.timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"the step before failed on this rank ({context.rank}) and not on {_missing(store, keys)}, within "
            f"{context.timeout.total_seconds():.0f} s: they wait for what this rank left out, and a next step would "
            f"answer them with other values. An exception may be caught only where it is raised on all ranks: check a "
            f"loss after summing it over them, say"
        ) from error
    for rank, key in enumerate(keys):
        theirs = json.loads(store.get(key))
        if theirs != mine:
            axes = next(axes for axes in sorted({*mine, *theirs}) if mine.get(axes) != theirs.get(axes))
            raise RuntimeError(
                f"the step before failed on all ranks, but not in the same place: rank {context.rank} had run "
                f"{mine.get(axes, 0)} collectives over {axes}, rank {rank} {theirs.get(axes, 0)}, so that those of a "
                f"next step would not meet. Start the run again from its last checkpoint"
            )


def _missing(store: dist.Store, keys: list[str]) -> str:
    try:
        ranks = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:  # its rank has gone meanwhile
        return "all others"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
