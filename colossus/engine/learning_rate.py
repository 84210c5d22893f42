"""The learning rate of each step."""

from __future__ import annotations

import torch

from colossus.config import Config
from colossus.engine.optimizers import keep_lr_scales
from colossus.registry import LR_SCHEDULES


class LearningRate:
    """Sets the learning rate of an optimizer's parameter groups.

    A group with an ``lr`` of its own, or an ``lr_scale``, has that share of the schedule's.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer) -> None:
        self._schedule, self._train, self._peak = config.lr_schedule, config.train, config.optimizer.lr
        shape = config.lr_schedule.type
        self._shape = shape if callable(shape) else LR_SCHEDULES.get(shape)
        self._optimizer, self._num_groups = optimizer, 0
        self._keep_scales()

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
        self._keep_scales()
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def _keep_scales(self) -> None:
        """Of parameter groups that are new. Others have theirs, or were loaded from a state that knows none."""
        groups = self._optimizer.param_groups
        keep_lr_scales(groups[self._num_groups :], self._peak)
        self._num_groups = len(groups)
