"""The ranks of ``torch.distributed``, for calls outside of any `ParallelContext`."""

from __future__ import annotations

import os

from torch import distributed as dist

from colossus.context.groups import AxisGroup


def launched_ranks(caller: str) -> AxisGroup:
    """All of them; of a process that was started alone itself.

    Args:
        caller: what the error begins with.

    Raises:
        ValueError: several processes were started, and have not joined each other.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = tuple(range(dist.get_world_size()))
        return AxisGroup(("world",), ranks, dist.get_rank(), dist.group.WORLD)
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > 1 and not dist.is_initialized():
        raise ValueError(
            f"{caller}: {started} processes were started (WORLD_SIZE), but they are not joined yet: call "
            f"colossus.initialize or torch.distributed.init_process_group first"
        )
    return AxisGroup((), (0,), 0, None)
