"""The end of a train step: from summed gradients to updated parameters and the step's numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossus.config import Config
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.engine.lr_schedules import LearningRate
from colossus.engine.nonfinite import GradientWatch, LossScaler
from colossus.engine.results import StepResult
from colossus.engine.step_numbers import StepReduction
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.host_transfer import LateValue
from colossus.layout.parameter import full_model_order
from colossus.layout.split_parameter import as_shards
from colossus.schedule.executor import StepTotals


class OptimizerStep:
    """Divides, watches and clips the gradients of a step, and updates the parameters or skips the step.

    Attributes:
        reduction: adds up the step's numbers.
        watch: for gradients that are not finite.
        loss_scaler: of fp16, else None.
        learning_rate: of each step.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: ParameterStore,
        strategy: Strategy,
    ) -> None:
        train, parts, context = config.train, strategy.parts, strategy.parts.context
        self._optimizer, self._strategy, self._clip_value = optimizer, strategy, train.clip_grad_value
        norm = GradientNorm(store.parameters(), context, {id(store.stored(param)) for param in parts.counted_elsewhere})
        self.loss_scaler: LossScaler | None = None
        if context.precision.scales_loss:
            self.loss_scaler = LossScaler(train.loss_scale, context, train.global_batch_size)
        self.reduction = StepReduction(context, norm, strategy, train.clip_grad_norm)
        self.watch = GradientWatch(train, context, strategy, norm, full_model_order(model), self.loss_scaler)
        self.learning_rate, self._late_stops = LearningRate(config, optimizer), LateValue()
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
        with as_shards():
            own, scale = self.reduction.finish_step(
                totals.loss_sum, totals.tokens, stop, mark, None if scaler is None else scaler.factor
            )
            found_inf = self.watch.check(step + 1, own[2], totals.loss_sum)
            lr = self.learning_rate.set(step)
            strategy.step(self._optimizer, scale, before_update, found_inf, self._clip_value)
            strategy.after_step(step)
            numbers = strategy.reduce_scalars(step, own)
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
            skipped=False if found_inf is None else found_inf,
            num_skipped=self.watch.num_skipped,
            loss_scale=loss_scale,
            replica=self._replica if is_own else None,
            own_tokens=None if self._num_replicas == 1 else strategy.replica_count(own),
        )
