"""The learning rate falls in a straight line to ``min_ratio`` of its peak."""

from colossus.registry import LR_SCHEDULES


@LR_SCHEDULES.register("linear")
def linear(progress: float, min_ratio: float) -> float:
    return 1.0 - (1.0 - min_ratio) * progress
