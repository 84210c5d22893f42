"""Collectives of tensors that exist in parts: written where they travel from, and read where they arrive.

Many small tensors that travel together would be copied into one, sent, and copied out of it again. Through shared
memory the first and the last of these copies are the only ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.collectives import Pending
from colossus.comm.recorded import is_recorded
from colossus.comm.shared_memory import channel_for
from colossus.context.groups import AxisGroup

#: writes a flat tensor
Fill = Callable[[Tensor], object]
#: reads flat tensors, which are valid during the call only
Take = Callable[[list[Tensor]], None]


def all_gather(
    size: int, dtype: torch.dtype, device: torch.device, group: AxisGroup, fill: Fill, take: Take
) -> Pending:
    """All-gather of a flat tensor of ``size`` elements that ``fill`` writes; ``take`` gets those of all ranks.

    ``wait()`` returns nothing of use: all is done when ``take`` has been called.
    """
    x = torch.empty(size, dtype=dtype, device=device)
    channel = None if is_recorded() or group.size == 1 else channel_for(x, group)
    if channel is not None:
        entry = collectives.record("all_gather", x, group)
        return Pending(channel.start_filled(x.shape, dtype, fill, lambda shards: _taken(take, shards)), entry)
    fill(x)
    return collectives.all_gather(x, group).then(lambda whole: _taken(take, list(whole.split(size))))


def reduce_scatter(
    size: int, dtype: torch.dtype, device: torch.device, group: AxisGroup, fill: Fill, take: Take
) -> Pending:
    """Reduce-scatter of [ranks, size] that ``fill`` writes; ``take`` gets addends whose sum is this rank's row.

    How many addends there are depends on the way the tensors travelled; their order does not depend on the rank.
    """
    x = torch.empty(group.size, size, dtype=dtype, device=device)
    channel = None if is_recorded() or group.size == 1 else channel_for(x, group)
    if channel is not None:
        entry = collectives.record("reduce_scatter", x, group)
        start = channel.start_filled(
            x.shape, dtype, fill, lambda stacked: _taken(take, [rows[group.index] for rows in stacked])
        )
        return Pending(start, entry)
    fill(x)
    return collectives.reduce_scatter(x, group).then(lambda row: _taken(take, [row.view(-1)]))


def _taken(take: Take, tensors: list[Tensor]) -> Tensor:
    take(tensors)
    return tensors[0]
