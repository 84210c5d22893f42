"""The end of a train step: from summed gradients to updated parameters and the step's numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from colossus.comm.host_transfer import HostRead
from colossus.comm.late import Late
from colossus.comm.step_regions import OPTIMIZER, in_region, over_replicas, region
from colossus.config import Config
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.engine.consistency import BatchCheck, ProgramCheck
from colossus.engine.loss_spikes import SpikeWatch
from colossus.engine.lr_schedules import LearningRate
from colossus.engine.nonfinite import GradientWatch, LossScaler
from colossus.engine.replica_check import ReplicaCheck
from colossus.engine.results import Routing, StepResult
from colossus.engine.routers import Routers
from colossus.error_place import located_error
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.square_digits import square_of
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import full_model_order
from colossus.layout.split_parameter import as_shards
from colossus.schedule.executor import StepObserver, StepTotals


class OptimizerStep:
    """Divides, checks and clips the gradients of a step, and updates the parameters or skips the step.

    Attributes:
        batch_check: compares the batches of ranks that share one.
        program_check: compares the layers that the ranks of a group have called; None with one rank.
        watch: checks that gradients are finite.
        loss_scaler: loss scale of fp16, else None.
        learning_rate: learning rate of each step.
        routers: routers of mixtures of experts.
        replica_check: compares copies of parameters; None if they are not compared.
        spike_watch: checks that losses do not rise far above earlier ones; None if that is not checked.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: ParameterStore,
        strategy: Strategy,
        routers: Routers,
    ) -> None:
        train, parts, context = config.train, strategy.parts, strategy.parts.context
        self._optimizer, self._strategy, self._train, self._context = optimizer, strategy, train, context
        self._is_running = False
        if context.world_size > 1:
            optimizer.register_step_pre_hook(self._refuse_step_by_hand)
        self._norm = GradientNorm(
            store.parameters(), context, {id(store.stored(param)) for param in parts.counted_elsewhere}
        )
        self.loss_scaler: LossScaler | None = None
        if context.precision.scales_loss:
            self.loss_scaler = LossScaler(train.loss_scale, context, train.global_batch_size)
        order, axes = full_model_order(model), strategy.summed_axes
        self.watch = GradientWatch(train, context, axes, self._norm, order, self.loss_scaler)
        self.batch_check, self.routers = BatchCheck(context), routers
        self.program_check = ProgramCheck(context, axes) if context.size(axes) > 1 else None
        every = train.check_replicas_every
        rolls_back = train.on_mismatch == "restart"
        self.replica_check = ReplicaCheck(every, train.steps, strategy, rolls_back=rolls_back) if every else None
        self.spike_watch = SpikeWatch(train.on_spike, strategy) if train.on_spike is not None else None
        self.learning_rate = LearningRate(config, optimizer)
        self._stops: Late[HostRead, None] = Late()
        # if several ranks have the same loss, or the same squares, one of them counts it
        coordinates, summed_axes = context.coordinates, set(strategy.summed_axes)
        self._counts_loss = all(coordinates[axis] == 0 for axis in summed_axes - set(loss_axes(context)))
        self._counts_norm = all(coordinates[axis] == 0 for axis in summed_axes - set(self._norm.axes))

    def check_result(self, result: StepResult) -> None:
        """Run the checks that are due after a step.

        Raises:
            ReplicasDiffer, LossSpike: on all ranks.
        """
        if self.replica_check is not None:
            self.replica_check.after_step(result.step)
        if self.spike_watch is not None:
            self.spike_watch.after_step(result)

    @in_region("optimizer step", OPTIMIZER)
    def run(
        self, step: int, totals: StepTotals, stop: float, mark: Tensor | None, observers: Sequence[StepObserver]
    ) -> StepResult:
        """Update the parameters after the gradients are summed. Collective.

        Args:
            step: number of the step, from 0.
            totals: sums of the step.
            stop: this rank's request to end training (`results.addend`).
            mark: mark of the batch, if ranks share one (`BatchCheck.mark`).
            observers: called once the gradients are divided and clipped.

        Raises:
            ValueError: on all ranks, if ranks that share a batch have different ones.
        """
        scaler, strategy, context = self.loss_scaler, self._strategy, self._context
        loss_scale = None if scaler is None else scaler.scale.clone()

        def before_update() -> None:
            for observer in observers:
                observer.before_update()

        with as_shards():
            own, scale = self._sum(totals, stop, mark)
            found_inf = self.watch.check(step + 1, own[2], own[1], totals.loss_sum)
            lr = self.learning_rate.set(step)
            self._is_running = True
            with region("optimizer update", OPTIMIZER):
                strategy.step(self._optimizer, scale, before_update, found_inf, self._train.clip_grad_value)
            self._is_running = False
            with region("strategy after_step", over_replicas(context)):
                strategy.after_step(step)
            numbers = strategy.reduce_scalars(step, own)
            requests = sum(read.wait().item() for read, _ in self._stops.push(HostRead(own[3]), None))
            stops = strategy.agree_on_stop(step, requests)
            if scaler is not None:
                scaler.update(found_inf, own[1])
            routing = self.routers.end_step(found_inf)
        torch.clear_autocast_cache()  # an autocast block around the step would use casts of the old weights
        return StepResult(
            step + 1,
            lr,
            numbers,
            stops,
            skipped=found_inf,
            num_skipped=self.watch.num_skipped,
            loss_scale=loss_scale,
            replica=None if strategy.is_summed(step) else context.index("data"),
            routing=None if routing is None else Routing(self.routers.sizes, routing),
            own_tokens=None if strategy.exact or context.size("data") == 1 else own[1],
        )

    def _refuse_step_by_hand(self, *_: object) -> None:
        if not self._is_running:
            raise located_error(
                f"the optimizer was stepped by hand, but {self._context.world_size} ranks share the model: the "
                f"gradients of a loss.backward() are of this rank's samples and shards alone, and nothing has summed "
                f"them. engine.train_step(batch) does forward, backward, sums, clipping and the update; terms that a "
                f"loop adds to a loss belong into loss_fn"
            )

    @in_region("gradient norm", OPTIMIZER)
    def _sum(self, totals: StepTotals, stop: float, mark: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the step's numbers, by one small all-reduce over all axes, and the factor of the gradients.

        Returns:
            For the global batch (under an inexact strategy, for the replica's): loss sum, tokens, gradient norm before
            clipping, stop requests. The norm is not finite if a gradient of any rank is not.
            The factor, a float64 scalar: one over the tokens and the loss scale, times the factor that clips the
            gradient of the mean loss.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self._context.device)
        squares = self._strategy.squares_of_step(self._norm, self._norm.local_squares(self._context.device))
        if not self._counts_norm:  # another rank counts the same; 0 * inf is still not finite
            squares = squares * 0.0
        loss = [totals.loss_sum, totals.tokens] if self._counts_loss else [zero, zero]
        marks = [] if self.program_check is None else [zero + self.program_check.mark()]
        marks += [] if mark is None else [mark]
        numbers = self._strategy.replica_scalars(torch.stack([*loss, squares.sum(), zero + stop, *marks]))
        if mark is not None:
            self.batch_check.check(numbers[-1])
        if self.program_check is not None:
            self.program_check.check(numbers[4])
        count = torch.where(numbers[1] == 0, 1.0, numbers[1])
        factor = None if self.loss_scaler is None else self.loss_scaler.factor
        divisor = count if factor is None else count * factor
        square = numbers[2]
        if self._context.options.reproducible:
            digits = self._norm.local_digits(self._context.device) * float(self._counts_norm)
            square = square_of(self._strategy.replica_scalars(digits))
        norm = square.sqrt() / divisor
        if self.program_check is not None and norm.device.type != "cpu":  # raised one step late: until then no update
            norm = torch.where(numbers[4] == 0, norm, torch.nan)
        scale = 1.0 / divisor
        if self._train.clip_grad_norm is not None:
            scale = scale * (self._train.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return torch.stack([numbers[0], numbers[1], norm, numbers[3]]), scale


def loss_axes(context: ParallelContext) -> tuple[str, ...]:
    """Return the axes over which losses are summed: those that split samples or tokens, and the pipeline's."""
    split = model_parallel_of(context).regions.whole.shard_axes
    return tuple(
        axis for axis in context.grid.names if axis in split or (axis == "pipeline" and context.size("pipeline") > 1)
    )
