"""The end of a train step: from summed gradients to updated parameters and the step's numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colossus.config import Config
from colossus.data_parallel.strategy import Strategy
from colossus.engine.loss_scale import LossScaler
from colossus.engine.nonfinite import GradientWatch
from colossus.engine.optimizers import keep_lr_scales
from colossus.engine.results import StepResult
from colossus.engine.step_numbers import StepReduction
from colossus.gradients.host_transfer import LateValue
from colossus.layout.split_parameter import as_shards
from colossus.registry import LR_SCHEDULES
from colossus.schedule.runtime.executor import StepTotals


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


class OptimizerStep:
    """Divides, watches and clips the gradients of a step, and updates the parameters or skips the step.

    Attributes:
        learning_rate: of each step.
        loss_scaler: of fp16, else None.
        watch: for gradients that are not finite.
    """

    def __init__(
        self,
        config: Config,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        reduction: StepReduction,
        watch: GradientWatch,
        loss_scaler: LossScaler | None,
    ) -> None:
        self._optimizer, self._strategy, self._reduction, self.watch = optimizer, strategy, reduction, watch
        self.learning_rate, self.loss_scaler = LearningRate(config, optimizer), loss_scaler
        self._clip_value = config.train.clip_grad_value
        self._late_stops = LateValue()
        context = strategy.parts.context
        self._replica, self._num_replicas = context.index("data"), context.size("data")

    def run(
        self, step: int, totals: StepTotals, stop: float, mark: Tensor | None, before_update: Callable[[], None]
    ) -> StepResult:
        """Collective, once the gradients are summed.

        Args:
            step: from 0.
            stop: this rank's request to end training (`results.addend`).
            mark: of the batch (`BatchCheck.mark`).
            before_update: called once the gradients are divided and clipped.

        Raises:
            ValueError: see `StepReduction.finish_step`.
            NonFiniteGradients: see `GradientWatch.check`.
        """
        scaler, strategy = self.loss_scaler, self._strategy
        loss_scale = None if scaler is None else scaler.scale.clone()
        factor = None if scaler is None else scaler.factor
        with as_shards():
            numbers, scale = self._reduction.finish_step(totals.loss_sum, totals.tokens, stop, mark, factor)
            found_inf = self.watch.check(step + 1, numbers[2], totals.loss_sum)
            lr = self.learning_rate.set(step)
            strategy.step(self._optimizer, scale, before_update, found_inf, self._clip_value)
            strategy.after_step(step)
            own = numbers
            numbers = strategy.reduce_scalars(step, numbers)
            stops = strategy.agree_on_stop(step, self._late_stops.push(own[3]) or 0.0)
            if scaler is not None:
                scaler.update(found_inf, own[1])
        is_own = not strategy.is_summed(step)
        torch.clear_autocast_cache()  # an outer block would keep casts of the weights from before the step
        return StepResult(
            step + 1,
            lr,
            numbers,
            stops,
            self._reduction.batch_check.require_zero if mark is not None else None,
            skipped=False if found_inf is None else found_inf,
            num_skipped=self.watch.num_skipped,
            loss_scale=loss_scale,
            replica=self._replica if is_own else None,
            own_tokens=None if self._num_replicas == 1 else strategy.replica_count(own),
        )
