"""The learning rate stays."""

from colossus.registry import LR_SCHEDULES


@LR_SCHEDULES.register("constant")
def constant(progress: float, min_ratio: float) -> float:
    return 1.0
