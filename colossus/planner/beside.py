"""Blocks that run one after the other, and what travels beside them: weights that come, gradients that leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block in one forward or backward.

    Attributes:
        computing: of it by itself.
        arriving: of what has to be there when it begins; it starts to come when the block before begins.
        leaving: of what is sent when it has ended.
    """

    computing: float
    arriving: float = 0.0
    leaving: float = 0.0


def run_beside(blocks: Sequence[BlockSeconds], *, overlaps: bool) -> tuple[float, float]:
    """Seconds until the last block has ended, and until all has been sent.

    What travels does so one after the other, in the order in which it is started.

    Args:
        overlaps: whether it does so while blocks run.
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
