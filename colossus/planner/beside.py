"""The overlap of blocks that run one after the other with the gathers of their weights and sums of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block in one forward or backward.

    Attributes:
        computing: seconds of the block's own work.
        arriving: seconds of a transfer that must end before the block starts; it begins when the block before it does.
        leaving: seconds of a transfer that begins when the block has ended.
    """

    computing: float
    arriving: float = 0.0
    leaving: float = 0.0


def run_beside(blocks: Sequence[BlockSeconds], *, overlaps: bool) -> tuple[float, float]:
    """Return the seconds until the last block has ended, and until the last transfer has ended.

    Transfers run one after the other, in the order in which they begin.

    Args:
        blocks: the blocks in the order in which they run.
        overlaps: whether transfers run while blocks do.
    """
    if not overlaps:
        end = sum(block.computing + block.arriving + block.leaving for block in blocks)
        return end, end
    now = free = 0.0
    ready = free = blocks[0].arriving if blocks else 0.0
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        now = max(now, ready)
        if following is not None and following.arriving:
            free = max(free, now) + following.arriving
            ready = free
        now += block.computing
        if block.leaving:
            free = max(free, now) + block.leaving
    return now, max(now, free)
