"""Learning rates: warm-up, and after it a shape from progress in [0, 1] to a factor of the peak. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from colossus.config import Config
from colossus.registry import LR_SCHEDULES

if TYPE_CHECKING:
    import torch


def constant(progress: float, min_ratio: float) -> float:
    """The learning rate stays."""
    return 1.0


def cosine(progress: float, min_ratio: float) -> float:
    """The learning rate falls along half a cosine (1608.03983) to ``min_ratio`` of its peak."""
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(progress: float, min_ratio: float) -> float:
    """The learning rate falls in a straight line to ``min_ratio`` of its peak."""
    return 1.0 - (1.0 - min_ratio) * progress


class LearningRate:
    """Sets the learning rate of an optimizer's parameter groups.

    A group with an ``lr`` of its own, or an ``lr_scale``, has that share of the schedule's.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer) -> None:
        self._schedule, self._train, self._peak = config.lr_schedule, config.train, config.optimizer.lr
        shape = config.lr_schedule.type
        self._shape = shape if callable(shape) else LR_SCHEDULES.get(shape)
        self._optimizer = optimizer
        for group in optimizer.param_groups:
            if "lr" in group:
                group.setdefault("lr_scale", float(group["lr"]) / self._peak)

    def at(self, step: int) -> float:
        """Of step ``step`` (from 0): linear warm-up, then the schedule's shape."""
        schedule = self._schedule
        if step < schedule.warmup_steps:
            return self._peak * (step + 1) / schedule.warmup_steps
        length = max(1, self._train.schedule_steps - schedule.warmup_steps)
        progress = min(1.0, (step - schedule.warmup_steps) / length)
        return self._peak * self._shape(progress, schedule.min_ratio, **schedule.options)

    def set(self, step: int) -> float:
        """Set that of step ``step``, and return it."""
        lr = self.at(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr
