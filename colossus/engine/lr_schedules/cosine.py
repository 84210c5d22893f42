"""The learning rate falls along half a cosine (1608.03983) to ``min_ratio`` of its peak."""

import math

from colossus.registry import LR_SCHEDULES


@LR_SCHEDULES.register("cosine")
def cosine(progress: float, min_ratio: float) -> float:
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
