"""An all-to-all of parts of any length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm import accounting, collectives, log
from colossus.context.groups import AxisGroup


def exchange(x: Tensor, counts: Sequence[int], group: AxisGroup) -> list[Tensor]:
    """Give each rank its part of ``x`` along dim 0, and get a part from each: one list entry for each rank.

    Args:
        x: [sum of counts, ..]; dims but the first are the same on all ranks.
        counts: for each rank of the group the length of its part, maybe 0.
    """
    if group.size == 1:
        return [x]
    own = torch.tensor([counts], device=x.device)
    table = collectives.all_gather(own, group).wait().tolist()
    received = [row[group.index] for row in table]
    sent = (len(x) - counts[group.index]) * x[:1].numel() * x.element_size() if len(x) else 0
    for counter in accounting.listeners:
        counter.add("all_to_all", str(group), x.dtype, sent)
    entry = log.record("all_to_all", str(group), tuple(x.shape), x.dtype)
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, list(counts), group=group.process_group)
    if entry is not None:
        entry.done = True
    return list(out.split(received))
